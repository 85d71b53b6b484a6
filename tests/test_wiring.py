"""How the driver is put together: what of the configuration reaches which component."""

from logmirror.config import load_text
from logmirror.wiring import PATIENCE_MS, considerate, mirror_specs

FOLDER = "{type: filesystem, root: /archive}"
CLUSTER = "{type: kafka, bootstrap-servers: 'b:9092'}"
LIMITS = "flush: {max-time-ms: 1, max-bytes: 1, max-offsets: 1}"


def mirrors(*pairs):
    """Specs of mirrors, each from a server to a destination."""
    text = "mirrors:\n"
    for number, (server, destination) in enumerate(pairs):
        text += f"""
- name: m{number}
  topic: t{number}
  partition: 0
  source: {{bootstrap-servers: "{server}"}}
  destinations: [{destination}]
  {LIMITS if destination is FOLDER else ""}
"""
    return mirror_specs(load_text(text, environ={}))


def budgets(specs):
    found = {spec.source.retry_budget_ms for spec in specs}
    return found | {
        to.cluster.retry_budget_ms
        for spec in specs
        for _, to in spec.destinations
        if hasattr(to, "cluster")
    }


def test_a_single_cluster_has_all_the_patience_there_is():
    specs = mirrors(("a:9092", FOLDER), ("a:9092", FOLDER))

    assert considerate(specs) == specs
    assert min(budgets(specs)) > PATIENCE_MS


def test_of_several_clusters_none_holds_up_the_others_for_long():
    for pairs in ([("a:9092", FOLDER), ("b:9092", FOLDER)], [("a:9092", CLUSTER)]):
        specs = mirrors(*pairs)

        assert budgets(considerate(specs)) == {PATIENCE_MS}
        assert [spec.name for spec in considerate(specs)] == [spec.name for spec in specs]
