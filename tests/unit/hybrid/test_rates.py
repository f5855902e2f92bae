"""Rates of collectives from their times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemas import check_schema
from sweeps import examples

from lightning_autosync.errors import DocumentError
from lightning_autosync.hybrid.pricing import CollectiveTiming, fit_rate
from lightning_autosync.hybrid.rates import CollectiveRate, HybridRates

WIRE = 40e-9
"""Seconds a byte of a slow link."""


def _timings(rate: CollectiveRate, paces: list[float], latency: float = 1e-4) -> list[CollectiveTiming]:
    found = []
    for ranks in (2, 4):
        for sent in (1e3, 1e5, 1e6):
            for pace in paces:
                host = rate.call + rate.peer * (ranks - 1) + rate.host * sent
                found.append(
                    CollectiveTiming(ranks, sent, sent * pace, latency, host + rate.wire * sent * pace + latency)
                )
    return found


@examples(50)
@given(st.floats(1e-5, 1e-3), st.floats(1e-6, 1e-4), st.floats(1e-10, 1e-8), st.floats(0.5, 2.0))
def test_what_made_the_times_is_found(call: float, peer: float, host: float, wire: float) -> None:
    rate = CollectiveRate(call=call, peer=peer, host=host, wire=wire)
    found = fit_rate(_timings(rate, [WIRE, WIRE / 10, WIRE / 1000]))
    for name in ("call", "peer", "host", "wire"):
        assert getattr(found, name) == pytest.approx(getattr(rate, name), rel=1e-3, abs=1e-9)


def test_where_all_links_are_alike_bytes_cost_their_time() -> None:
    rate = CollectiveRate(call=1e-4, peer=1e-5, host=1e-9, wire=1.1)
    found = fit_rate(_timings(rate, [WIRE]))
    assert found.host == 0
    assert found.wire == pytest.approx(1.1 + 1e-9 / WIRE, rel=1e-6)


def test_where_links_do_not_show_bytes_cost_the_hosts_time() -> None:
    rate = CollectiveRate(call=1e-5, peer=1e-5, host=1e-9, wire=1.0)
    found = fit_rate(_timings(rate, [1e-12]))
    assert found.host == pytest.approx(1e-9, rel=0.01)


def test_one_size_is_not_enough() -> None:
    with pytest.raises(DocumentError, match="1 timings of a collective; at least two sizes"):
        fit_rate([CollectiveTiming(2, 1.0, 1.0, 0.0, 1.0)])


def test_rates_are_a_document(tmp_path) -> None:
    rates = HybridRates(flops=1e9, all_reduce=CollectiveRate(call=1e-3, peer=0, host=0))
    rates.save(tmp_path / "rates.yaml")
    assert HybridRates.load(tmp_path / "rates.yaml") == rates
    check_schema(HybridRates, rates.to_dict())
    (tmp_path / "wrong.yaml").write_text("format: autosync-hybrid-rates/1\nflops: fast\n")
    with pytest.raises(DocumentError, match=r"wrong\.yaml: flops:"):
        HybridRates.load(tmp_path / "wrong.yaml")
