"""The peer: Spark's own Kafka connector reads a topic and writes Parquet. Prints seconds as JSON.

    spark_connector.py MASTER JARS BOOTSTRAP TOPIC FOLDER

Only the flow is timed: the session and the first request for the topic come before it.
"""

import json
import os
import sys
import time
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    from pyspark.sql import SparkSession

master, jars, bootstrap, topic, folder = sys.argv[1:]
os.environ["PYSPARK_PYTHON"] = sys.executable
session = (
    SparkSession.builder.master(master)
    .config("spark.jars", jars)
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.memory", "2g")
    .config("spark.sql.parquet.compression.codec", "zstd")
    # The codec's own default is level 3; the mirror writes level 1.
    .config("spark.hadoop.parquet.compression.codec.zstd.level", "1")
    .getOrCreate()
)
source = (
    session.read.format("kafka")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", topic)
    .option("startingOffsets", "earliest")
    .option("includeHeaders", "true")
    .option("kafka.isolation.level", "read_committed")
    .load()
)
source.limit(1).collect()
began = time.monotonic()
source.write.mode("overwrite").parquet(folder)
seconds = time.monotonic() - began
records = session.read.parquet(folder).count()
print(json.dumps({"flow_s": seconds, "records": records}))
session.stop()
