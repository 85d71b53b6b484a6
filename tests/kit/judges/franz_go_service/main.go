// A service on franz-go, for tests: franz_go_service BOOTSTRAP TOPIC COUNT
//
// Creates TOPIC and TOPIC-out, and writes COUNT records to TOPIC, compressed with each codec in turn. Two
// members of a group read them, once with each group protocol. Two sessions of a third group copy them to
// TOPIC-out in transactions, the first of which is aborted. Prints what its clients see, as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	partitions = 4
	batch      = 25 // records of a transaction
	deadline   = 80 * time.Second
)

var (
	bootstrap, topic = os.Args[1], os.Args[2]
	count, _         = strconv.Atoi(os.Args[3])
	out              = topic + "-out"
	codecs           = []kgo.CompressionCodec{
		kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression(),
	}
)

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}

func connect(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(bootstrap))...)
	check(err)
	return client
}

// write produces the records with idempotent producers, one for each codec.
func write(ctx context.Context) {
	for part, codec := range codecs {
		producer := connect(kgo.ProducerBatchCompression(codec), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		var records []*kgo.Record
		for number := part * count / len(codecs); number < (part+1)*count/len(codecs); number++ {
			name := strconv.Itoa(number)
			records = append(records, &kgo.Record{
				Topic: topic, Partition: int32(number % partitions), Key: []byte("k" + name), Value: []byte("v" + name),
				Headers: []kgo.RecordHeader{{Key: "n", Value: []byte(name)}, {Key: "n", Value: nil}},
			})
		}
		check(producer.ProduceSync(ctx, records...).FirstErr())
		producer.Close()
	}
}

// group counts the partitions that each of its two members owns.
type group struct {
	name    string
	options []kgo.Opt
	mutex   sync.Mutex
	owned   [2]int
	changed chan struct{}
}

func newGroup(name string, options ...kgo.Opt) *group {
	return &group{name: topic + "-" + name, options: options, changed: make(chan struct{}, 1)}
}

// of returns the options of a member.
func (g *group) of(member int, options ...kgo.Opt) []kgo.Opt {
	add := func(sign int) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, changes map[string][]int32) {
			g.mutex.Lock()
			g.owned[member] += sign * len(changes[topic])
			g.mutex.Unlock()
			select {
			case g.changed <- struct{}{}:
			default: // the reader has not yet seen the change before
			}
		}
	}
	common := []kgo.Opt{
		kgo.SeedBrokers(bootstrap), kgo.ConsumeTopics(topic), kgo.ConsumerGroup(g.name), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.HeartbeatInterval(200 * time.Millisecond),
		kgo.OnPartitionsAssigned(add(1)), kgo.OnPartitionsRevoked(add(-1)), kgo.OnPartitionsLost(add(-1)),
	}
	return slices.Concat(common, g.options, options)
}

// wait returns when the members own these numbers of partitions.
func (g *group) wait(ctx context.Context, owned [2]int) {
	for {
		g.mutex.Lock()
		found := g.owned
		g.mutex.Unlock()
		if found == owned {
			return
		}
		select {
		case <-g.changed:
		case <-ctx.Done():
			log.Panicf("group %s: members own %v partitions, not %v", g.name, found, owned)
		}
	}
}

// both runs a function for each of two members, until their records are all that there are.
func both(ctx context.Context, step func(ctx context.Context, member int) int) {
	polling, stop := context.WithCancel(ctx)
	defer stop()
	var done atomic.Int64
	var members sync.WaitGroup
	for member := range 2 {
		members.Go(func() {
			for polling.Err() == nil {
				if done.Add(int64(step(polling, member))) >= int64(count) {
					stop()
				}
			}
		})
	}
	members.Wait()
	check(ctx.Err())
}

// polled returns the records of a poll; none if it was stopped.
func polled(polling context.Context, fetches kgo.Fetches) []*kgo.Record {
	if polling.Err() == nil {
		check(fetches.Err())
	}
	return fetches.Records()
}

// share reads the topic with two members, of which the second one joins when the first one owns all partitions.
func share(ctx context.Context, g *group) map[string]any {
	var members [2]*kgo.Client
	members[0] = connect(g.of(0)...)
	g.wait(ctx, [2]int{partitions, 0})
	members[1] = connect(g.of(1)...)
	g.wait(ctx, [2]int{partitions / 2, partitions / 2})
	var seen [2]map[int32][]string
	compressed := map[uint8]bool{}
	var mutex sync.Mutex
	both(ctx, func(polling context.Context, member int) int {
		records := polled(polling, members[member].PollFetches(polling))
		mutex.Lock()
		defer mutex.Unlock()
		if seen[member] == nil {
			seen[member] = map[int32][]string{}
		}
		for _, record := range records {
			seen[member][record.Partition] = append(seen[member][record.Partition], string(record.Value))
			compressed[record.Attrs.CompressionType()] = true
		}
		return len(records)
	})
	for _, member := range members {
		check(member.CommitUncommittedOffsets(ctx))
	}
	described := describe(ctx, members[0], g.name)
	for _, member := range members {
		member.Close()
	}
	return map[string]any{"described": described, "seen": seen, "codecs": len(compressed)}
}

// describe returns what the coordinator shows of a group of either protocol.
func describe(ctx context.Context, client *kgo.Client, name string) []string {
	admin := kadm.NewClient(client)
	consumer, err := admin.DescribeConsumerGroups(ctx, name)
	check(err)
	if found := consumer[name]; found.Err == nil {
		return []string{"consumer", found.AssignorName, found.State, strconv.Itoa(len(found.Members))}
	}
	classic, err := admin.DescribeGroups(ctx, name)
	check(err)
	found := classic[name]
	check(found.Err)
	return []string{"classic", found.Protocol, found.State, strconv.Itoa(len(found.Members))}
}

// transform copies the topic with two sessions. It returns the number of records in aborted transactions.
func transform(ctx context.Context) int {
	g := newGroup("copy", kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets())
	var sessions [2]*kgo.GroupTransactSession
	for member, owned := range [][2]int{{partitions, 0}, {partitions / 2, partitions / 2}} {
		id := kgo.TransactionalID(fmt.Sprintf("%s-%d", topic, member))
		partitioner := kgo.RecordPartitioner(kgo.ManualPartitioner())
		session, err := kgo.NewGroupTransactSession(g.of(member, id, partitioner)...)
		check(err)
		sessions[member] = session
		g.wait(ctx, owned)
	}
	var isFirst atomic.Bool
	isFirst.Store(true)
	var aborted atomic.Int64
	both(ctx, func(polling context.Context, member int) int {
		session := sessions[member]
		records := polled(polling, session.PollRecords(polling, batch))
		if len(records) == 0 {
			return 0
		}
		aborts := isFirst.CompareAndSwap(true, false)
		check(session.Begin())
		var copies []*kgo.Record
		for _, record := range records {
			value := record.Value
			if aborts {
				value = slices.Concat([]byte("aborted-"), value)
			}
			copies = append(copies, &kgo.Record{
				Topic: out, Partition: record.Partition, Key: record.Key, Value: value, Headers: record.Headers,
			})
		}
		check(session.ProduceSync(ctx, copies...).FirstErr())
		committed, err := session.End(ctx, kgo.TransactionEndTry(!aborts))
		check(err)
		if !committed {
			aborted.Add(int64(len(records)))
			return 0
		}
		return len(records)
	})
	for _, session := range sessions {
		session.Close()
	}
	return int(aborted.Load())
}

// read returns the values of TOPIC-out, by partition, up to its end.
func read(ctx context.Context, level kgo.IsolationLevel) map[int32][]string {
	client := connect(
		kgo.ConsumeTopics(out), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(level), kgo.KeepControlRecords(), // the last offset has a marker
	)
	defer client.Close()
	ends, err := kadm.NewClient(client).ListCommittedOffsets(ctx, out)
	check(err)
	check(ends.Error())
	seen := map[int32][]string{}
	for left := partitions; left > 0; {
		for _, record := range polled(ctx, client.PollFetches(ctx)) {
			if !record.Attrs.IsControl() {
				seen[record.Partition] = append(seen[record.Partition], string(record.Value))
			}
			if end, _ := ends.Lookup(out, record.Partition); record.Offset == end.Offset-1 {
				left--
			}
		}
		check(ctx.Err())
	}
	return seen
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	client := connect()
	created, err := kadm.NewClient(client).CreateTopics(ctx, partitions, 1, nil, topic, out)
	check(err)
	check(created.Error())
	client.Close()
	write(ctx)
	found := map[string]any{}
	var work sync.WaitGroup
	var classic, consumer map[string]any
	work.Go(func() { classic = share(ctx, newGroup("classic")) })
	work.Go(func() {
		sticky := kgo.Balancers(kgo.StickyBalancer())
		consumer = share(ctx, newGroup("consumer", kgo.ServerSideBalancer(), sticky))
	})
	found["aborted"] = transform(ctx)
	work.Wait()
	found["classic"], found["consumer"] = classic, consumer
	found["committed"] = read(ctx, kgo.ReadCommitted())
	found["uncommitted"] = read(ctx, kgo.ReadUncommitted())
	check(json.NewEncoder(os.Stdout).Encode(found))
}
