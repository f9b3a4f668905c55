"""A PostgreSQL server for tests: started on a free port, with its data in a temporary folder."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


def binaries() -> Path | None:
    """Return the folder of the server's programs; None if it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    on_path = shutil.which("pg_ctl")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Server:
    """A running server; `url` is the address of its database."""

    def __init__(self, programs: Path, folder: Path, *, durable: bool) -> None:
        self._programs, self._folder = programs, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if os.getuid() == 0:
            shutil.chown(folder, "postgres")
        self._run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "postgres", "--no-sync")
        self._fsync = "on" if durable else "off"
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync={self._fsync} "
            f"-c unix_socket_directories={self._folder} -c max_connections=60"
        )
        data, log = f"{self._folder}/data", f"{self._folder}/log"
        self._run("pg_ctl", "-D", data, "-w", "-o", options, "-l", log, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; "immediate" is a crash."""
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-w", "-m", mode, "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.getuid() == 0:  # the server refuses to run as root
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextlib.contextmanager
def server(*, durable: bool = False):
    """Start a server and stop it at the end; skip the test where there is none."""
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'tacit-dp[engines]'")
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="tacit-postgres-"))
    folder.chmod(0o755)
    try:
        running = Server(programs, folder, durable=durable)
        try:
            yield running
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                running.stop("immediate")
    finally:
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)
