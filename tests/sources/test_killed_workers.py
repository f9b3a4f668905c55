"""A worker that is killed in the middle of a pass changes no statistic."""

import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from engine_cases import SCHEMAS, troubled_table

from tacit.sources import moments

pq = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for part in range(8):
        pq.write_table(troubled_table(60_000, seed=part), folder / f"{part}.parquet")
    return folder


@pytest.fixture(scope="module")
def expected(files):
    import pyarrow as pa

    parts = [pq.read_table(path) for path in sorted(files.glob("*.parquet"))]
    return moments([pa.concat_tables(parts)], SCHEMAS["records"]).gram


def in_background(work):
    """Start `work` in a thread; return a function that waits for its result."""
    box = {}

    def run():
        try:
            box["result"] = work()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(900)
        if "error" in box:
            raise box["error"]
        return box["result"]

    return thread, result


def test_dask_with_a_killed_worker(files, expected):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    import dask
    import dask.dataframe as dd

    killed = []
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 10}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as c,
        distributed.Client(c) as client,
    ):
        pids = list(client.run(os.getpid).values())
        table = dd.read_parquet(str(files / "*.parquet"))
        thread, result = in_background(lambda: moments(table, SCHEMAS["records"]).gram)
        deadline = time.monotonic() + 600
        while not killed and time.monotonic() < deadline:
            if any(client.processing().values()) and thread.is_alive():
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])
            time.sleep(0.01)
        np.testing.assert_array_equal(result(), expected)
    assert killed


def test_spark_with_a_killed_worker(files, expected):
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    import shutil

    if shutil.which("java") is None:
        pytest.skip("Spark needs Java: apt install openjdk-17-jre-headless")
    if sql.SparkSession.getActiveSession() is not None:
        pytest.skip("another Spark session is active: run this test by itself")
    builder = sql.SparkSession.builder.master("local-cluster[2,1,1024]")
    builder = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    session = builder.config("spark.sql.files.maxPartitionBytes", "1m").getOrCreate()
    try:
        table = session.read.parquet(str(files))
        tracker = session.sparkContext.statusTracker()
        thread, result = in_background(lambda: moments(table, SCHEMAS["records"]).gram)
        killed, deadline = [], time.monotonic() + 600
        while not killed and thread.is_alive() and time.monotonic() < deadline:
            stages = [tracker.getStageInfo(s) for s in tracker.getActiveStageIds()]
            if any(stage and stage.numActiveTasks and stage.numCompletedTasks for stage in stages):
                listed = subprocess.run(
                    ["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True
                )
                workers = [int(line.split()[0]) for line in listed.stdout.splitlines()
                           if "CoarseGrainedExecutorBackend" in line
                           and session.sparkContext.applicationId in line]  # fmt: skip
                for worker in workers[:1]:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
            time.sleep(0.02)
        np.testing.assert_array_equal(result(), expected)
        assert killed
    finally:
        session.stop()
