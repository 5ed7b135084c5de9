#!/usr/bin/env python3
"""The chain beside every schedule that bench_peers.py knows, at loopback, on the wide network."""

from __future__ import annotations

import sys

from bench_peers import main

SCHEDULES = "single-*,ddp,gpipe*,1f1b*,bfs*,interleaved*,izb*,zbv*,dualpipev*,chain"

if __name__ == "__main__":
    sys.exit(main(["--network", "mlp-1024", "--contenders", SCHEDULES, *sys.argv[1:]]))
