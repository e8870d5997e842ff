"""The benchmark of slow links: what it counts and times, and that it leaves no network behind."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.dom import minidom

import network_namespaces as networks
import pytest
import slow_links_page as page
import slow_links_rows as rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

needs_namespaces = pytest.mark.skipif(bool(networks.why_not()), reason=networks.why_not())


def left_over(name: str) -> str:
    commands = (["ip", "netns", "list"], ["ip", "-brief", "link"])
    listed = [subprocess.run(one, capture_output=True, text=True).stdout for one in commands]
    return "\n".join(line for line in "".join(listed).splitlines() if name in line)


@needs_namespaces
def test_bytes_between_workers_are_counted_and_all_is_removed() -> None:
    with networks.open_network([None, 500.0]) as network:
        assert left_over(network.name)
        network.set_rates([500.0, None])
        before = network.traffic()
        done = networks.transfer(network, 0, 1, seconds=0.05)
        after = network.traffic()
        assert 1.0 <= (after[0].sent - before[0].sent) / done.bytes < 1.1
        assert 1.0 <= (after[1].received - before[1].received) / done.bytes < 1.1
    assert not left_over(network.name)


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    script = "import os, signal; from network_namespaces import open_network as o\n"
    script += "with o([None]) as n: print(n.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True
    )
    name = killed.stdout.strip()
    assert left_over(name)
    networks.remove_leftovers()
    assert not left_over(name)


def test_a_worker_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    network = networks.Network(2, isolated=False, rates=[None, None])
    script = "import os, sys; sys.exit('no such setting') if os.environ['RANK'] == '1' else 0"
    with pytest.raises(
        networks.WorkersError, match="worker 1 ended with status 1: no such setting"
    ):
        networks.run_workers(network, [sys.executable, "-c", script], logs=tmp_path, timeout=60)


def test_bytes_are_read_between_two_readings_of_the_counters() -> None:
    traffic = [[networks.Traffic(sent, 0)] for sent in (0, 100, 300)]
    readings = networks.Readings([10.0, 11.0, 12.0], traffic)
    assert readings.sent_between(10.5, 11.5) == [150.0]
    assert readings.sent_between(0.0, 99.0) == [300.0]


def test_links_are_parsed_and_bad_ones_are_refused() -> None:
    for text in ("50", "unlimited", "1000+slow-link", "unlimited+slow-cpu"):
        assert str(rows.Links.parse(text)) == text
    for text in ("fast", "50+slow", "unlimited+slow-link"):
        with pytest.raises((ValueError, rows.argparse.ArgumentTypeError)):
            rows.Links.parse(text)


def test_every_stretch_of_rare_exchanges_has_one_and_no_two_stretches_overlap() -> None:
    links = [rows.Links(rate) for rate in (None, 200.0, 50.0)]
    for row in rows.ROWS:
        plan = rows.stretches(row, links, workers=8)
        assert [one.links for one in plan] == links
        assert all(a.end <= b.first for a, b in pairwise(plan))
        if row.period > 1:
            # The exchange after step 10 is used in step 11, which is number 10 from 0.
            assert all(sum(n % 10 == 0 for n in range(one.first, one.end)) == 1 for one in plan)


def test_the_page_says_when_each_row_reaches_the_loss_that_all_reach(tmp_path: Path) -> None:
    def runs(losses: list[list[float]], seconds: float) -> dict[str, object]:
        both = {"training": [3.0, 2.0], "lr": 0.002, "tuned": True, "date": "today", "code": "abc"}
        times = {"unlimited": 0.1, "50": seconds}
        return {
            "curve": {"losses": losses, "sent_per_step": 1e6, **both},
            "times": {"step_seconds": times, **both},
        }

    ddp, ring = [[0, 5.0], [10, 4.0], [20, 3.0]], [[0, 5.0], [10, 4.5], [20, 3.5]]
    facts = dict.fromkeys(("machine", "model", "batch", "text"), "x") | {"unshaped": ""}
    facts |= {"lrs": [1e-3, 2e-3], "tuned_steps": 72, "steps": 20}
    made = {"4": {"ddp": runs(ddp, 2.0), "gossip-ring": runs(ring, 0.5)}}
    page.write_page(json.loads(json.dumps({"facts": facts, "runs": made})), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "validation loss is 3.5000" in text
    assert "| ddp | 1.5 | 30.0 |" in text
    assert "| gossip-ring | 2.0 | 10.0 |" in text
    drawn = minidom.parse(str(tmp_path / "loss-4-workers.svg"))
    assert len(drawn.getElementsByTagName("polyline")) == 4
