"""Prometheus text in the shape in which Ray 2.60 exports the project's metrics and vLLM's."""

from __future__ import annotations

RAY = 'Component="core_worker",NodeAddress="10.0.0.1",SessionName="s",Version="2.60.0",WorkerId="w"'


def scrape_text(*, mapped: int = 12) -> str:
    """`mapped` handoffs, three of them slow, and two recomputed ones."""
    fast = mapped - 3
    stage = f'{RAY},path="mapped",stage="total",temperature="warm"'
    ttft = f'{RAY},engine="0",model_name="tiny-1b"'
    return "\n".join(
        [
            "# TYPE ray_kvcascade_handoff_seconds histogram",
            *_histogram("ray_kvcascade_handoff_seconds", stage, {"0.1": 0, "0.2": fast}, mapped),
            "# TYPE ray_kvcascade_handoff_total counter",
            f'ray_kvcascade_handoff_total{{{RAY},outcome="mapped",reason="none"}} {mapped}.0',
            f'ray_kvcascade_handoff_total{{{RAY},outcome="recompute",reason="short"}} 2.0',
            "# TYPE ray_kvcascade_handoff_bytes_total counter",
            f'ray_kvcascade_handoff_bytes_total{{{RAY},direction="written"}} 1.5e+09',
            "# TYPE ray_kvcascade_requests_in_flight gauge",
            f"ray_kvcascade_requests_in_flight{{{RAY}}} 2.0",
            "# TYPE ray_vllm_time_to_first_token_seconds histogram",
            *_histogram("ray_vllm_time_to_first_token_seconds", ttft, {"0.1": 8}, 8),
            "",
        ]
    )


def _histogram(name: str, labels: str, counts: dict[str, int], total: int) -> list[str]:
    buckets = {**counts, "0.5": total, "+Inf": total}
    lines = [f'{name}_bucket{{{labels},le="{le}"}} {count}.0' for le, count in buckets.items()]
    return [*lines, f"{name}_count{{{labels}}} {total}.0", f"{name}_sum{{{labels}}} 2.5"]
