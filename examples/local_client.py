"""A client that sends one noisy answer; the true one never leaves this process.

    python examples/local_client.py --server http://127.0.0.1:8000 --answer bus --most 1

The client does the randomizing, so it decides: it refuses an epsilon above --most.
"""

import argparse
import json
from urllib.request import Request, urlopen

from tacit.local import RandomizedResponse
from tacit.mechanisms import secure_generator


def send(server: str, answer: str, most: float) -> int:
    """Send one report and return how many the server has."""
    with urlopen(f"{server}/settings", timeout=10) as reply:
        settings = json.load(reply)
    options, epsilon = settings["options"], settings["epsilon"]
    if epsilon > most:
        raise SystemExit(f"the server asks for epsilon {epsilon}, above {most}: nothing was sent.")
    oracle = RandomizedResponse(epsilon=epsilon, n_options=len(options))
    report = int(oracle.randomize(options.index(answer), rng=secure_generator()))
    request = Request(f"{server}/report", data=json.dumps(report).encode(), method="POST")
    with urlopen(request, timeout=10) as reply:
        return json.load(reply)["received"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--answer", required=True)
    parser.add_argument("--most", type=float, default=1.0, help="largest epsilon accepted")
    given = parser.parse_args()
    print(send(given.server, given.answer, given.most), "reports received")
