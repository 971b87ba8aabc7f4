"""moto with a market that can be empty: `python -m tests.fleet.moto_server HOST:PORT REFUSE_SPOT REQUESTS`."""

import json
import sys
from pathlib import Path
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses.instances import InstanceResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


class NoCapacity(EC2ClientError):
    """What EC2 says of spot that nobody can have."""

    def __init__(self) -> None:
        super().__init__(
            "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request."
        )


def watch(refuse_spot: Path, requests: Path) -> None:
    """Have moto write down what is asked for, and refuse spot while the file is there."""
    run = InstanceResponse.run_instances

    def run_instances(self: Any) -> Any:
        market = self._get_param("InstanceMarketOptions.MarketType", "on-demand")
        refused = market == "spot" and refuse_spot.exists()
        entry = {"type": self._get_param("InstanceType"), "count": int(self._get_param("MaxCount")), "market": market}
        with requests.open("a") as file:
            file.write(json.dumps(entry | {"refused": refused}) + "\n")
        if refused:
            raise NoCapacity
        self.params["MinCount"] = self.params[
            "MaxCount"
        ]  # as EC2 does while it has enough; moto would start the fewest
        return run(self)

    InstanceResponse.run_instances = run_instances


def main() -> None:
    watch(Path(sys.argv[2]), Path(sys.argv[3]))
    host, _, port = sys.argv[1].partition(":")
    run_simple(host, int(port), DomainDispatcherApplication(create_backend_app), threaded=True)


if __name__ == "__main__":
    main()
