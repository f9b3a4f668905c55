"""Frequency oracles of multi-freq-ldpy and pure-ldp, run by an interpreter that has them.

    OTHER_PYTHON benchmarks/_local_peers.py N_REPORTS N_OPTIONS EPSILON REPEATS

Prints one JSON object: versions, and for each oracle the mean squared error over options and the
median CPU seconds to estimate from all reports. An oracle that does not run has its error listed.
"""

import json
import statistics
import sys
import time
from importlib.metadata import version

import numpy as np


def multi_freq(k, epsilon):
    """Oracles of multi-freq-ldpy: a client function and an aggregator each."""
    from multi_freq_ldpy.pure_frequency_oracles import GRR, LH, UE

    return {
        "multi-freq-ldpy GRR": (
            lambda x: GRR.GRR_Client(x, k, epsilon),
            lambda reports: GRR.GRR_Aggregator_MI(reports, k, epsilon),
        ),
        "multi-freq-ldpy OUE": (
            lambda x: UE.UE_Client(x, k, epsilon, True),
            lambda reports: UE.UE_Aggregator_MI(reports, epsilon, True),
        ),
        "multi-freq-ldpy OLH": (
            lambda x: LH.LH_Client(x, k, epsilon, True),
            lambda reports: LH.LH_Aggregator_MI(reports, k, epsilon, True),
        ),
    }


def pure(k, epsilon):
    """Oracles of pure-ldp: a client, and a server that aggregates one report at a time."""
    from pure_ldp.frequency_oracles.direct_encoding import DEClient, DEServer
    from pure_ldp.frequency_oracles.hadamard_response import (
        HadamardResponseClient,
        HadamardResponseServer,
    )
    from pure_ldp.frequency_oracles.local_hashing import LHClient, LHServer
    from pure_ldp.frequency_oracles.unary_encoding import UEClient, UEServer

    def pair(client, server):
        def aggregate(reports):
            server.reset()
            for report in reports:
                server.aggregate(report)
            return np.array(server.estimate_all(range(1, k + 1))) / len(reports)

        return (lambda x: client.privatise(x + 1)), aggregate

    hadamard = HadamardResponseServer(epsilon, k)
    return {
        "pure-ldp DE": pair(DEClient(epsilon, k), DEServer(epsilon, k)),
        "pure-ldp OUE": pair(
            UEClient(epsilon, k, use_oue=True), UEServer(epsilon, k, use_oue=True)
        ),
        "pure-ldp OLH": pair(
            LHClient(epsilon, k, use_olh=True), LHServer(epsilon, k, use_olh=True)
        ),
        "pure-ldp HR": pair(
            HadamardResponseClient(epsilon, k, hadamard.get_hash_funcs()), hadamard
        ),
    }


def measure(client, aggregate, options, k, repeats):
    """Return error and time of one oracle."""
    truth = np.bincount(options, minlength=k) / len(options)
    errors, seconds = [], []
    for _ in range(repeats):
        reports = [client(int(x)) for x in options]
        start = time.process_time()
        found = np.asarray(aggregate(reports), dtype=float)
        seconds.append(time.process_time() - start)
        errors.append(np.mean((found - truth) ** 2))
    return {"mse": float(np.mean(errors)), "seconds": statistics.median(seconds)}


def main() -> None:
    n, k, epsilon, repeats = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    options = np.random.default_rng(0).zipf(1.5, n) % k
    versions = ", ".join(f"{name} {version(name)}" for name in ("multi-freq-ldpy", "pure-ldp"))
    results = {"versions": versions}
    for family in (multi_freq, pure):
        try:
            oracles = family(k, epsilon)
        except Exception as error:  # an import that fails is part of the result
            results[family.__name__] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        for name, (client, aggregate) in oracles.items():
            try:
                results[name] = measure(client, aggregate, options, k, repeats)
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
