"""Programs of `data_path.py`, one per network namespace: an engine's memory, or a mapper.

Standard input has one JSON order per line, the answer is one JSON line. A memory has registered
blocks, a NIXL agent and the control socket of an engine's scheduler half, and no engine; a mapper
is the real `Converter`. Only the bench knows what is measured.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys
import uuid
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.orders import answers


class Role(Protocol):
    """What a program can be told to do: its public methods."""

    async def close(self) -> None: ...


class Memory:
    """Blocks of one engine. It announces them on demand and promises whatever it is asked for."""

    def __init__(
        self, host: str, *, layers: int, kv_heads: int, head_dim: int, tokens: int
    ) -> None:
        import torch

        from cluster.transport import make_agent
        from deployments.control import ControlServer, Outbox
        from deployments.messages import EngineLayout, WorkerLayout

        block_tokens = 32
        blocks = -(-tokens // block_tokens)
        self._cache_LBHS = torch.zeros(
            layers, blocks, kv_heads, block_tokens * 2 * head_dim, dtype=torch.bfloat16
        )
        name = f"memory-{uuid.uuid4().hex}"
        self._agent = make_agent(name, progress_thread=True, progress_delay_us=1_000)
        self._agent.register_memory(
            [(self._cache_LBHS.data_ptr(), self._cache_LBHS.nbytes, 0, "")], "DRAM"
        )
        self._control = ControlServer(host, self._answer)
        self._outbox = Outbox()
        worker = WorkerLayout(
            rank=0,
            agent_name=name,
            agent_metadata=self._agent.get_agent_metadata(),
            memory="DRAM",
            device_id=0,
            dtype="bfloat16",
            layer_addresses=tuple(layer.data_ptr() for layer in self._cache_LBHS),
            num_blocks=blocks,
            block_stride_bytes=self._cache_LBHS[0, 0].nbytes,
            block_size_tokens=block_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            permutation=None,
        )
        self._layout = EngineLayout(
            engine="memory",
            generation=uuid.uuid4().hex,
            control_address=self._control.address,
            workers=(worker,),
        )

    def _answer(self, message: Any) -> Any | None:
        from deployments.messages import Claim, Release, Verdict

        if isinstance(message, Claim | Release):
            return Verdict(ticket_id=message.ticket_id, held=True)
        return None

    async def layout(self) -> str:
        """The layout as mappers get it."""
        from deployments.messages import encode

        return base64.b64encode(encode(self._layout)).decode()

    async def announce(
        self, handoff_id: str, address: str, block_ids: list[int], late_s: float = 0.0
    ) -> None:
        """Offer blocks to a mapper, as a target's scheduler half does."""
        from deployments.messages import TargetBlocks

        await asyncio.sleep(late_s)
        size = self._layout.block_size_tokens
        message = TargetBlocks(
            handoff_id=handoff_id,
            start_token=0,
            num_tokens=len(block_ids) * size,
            block_ids=tuple(block_ids),
            layout=self._layout,
        )
        self._outbox.send(address, message)

    async def cpu_s(self) -> float:
        """Processor time of this process so far."""
        return _cpu_s()

    async def close(self) -> None:
        self._control.close()
        self._outbox.close()


class MapperNode:
    """A real converter with the identity map."""

    def __init__(
        self,
        host: str,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        chunk_tokens: int,
        handoffs: int,
    ) -> None:
        import torch

        from cluster.config import HandoffConfig, MapperConfig
        from deployments.conversion import Converter
        from mappers.geometry import KVGeometry
        from mappers.mapper import IdentityMapper

        torch.set_num_threads(1)
        geometry = KVGeometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        config = MapperConfig(
            small_to_large="identity", chunk_tokens=chunk_tokens, max_concurrent_handoffs=handoffs
        )
        self._converter = Converter(
            IdentityMapper(geometry, torch.bfloat16),
            "identity",
            config,
            HandoffConfig(deadline_s=120.0),
            dtype="bfloat16",
            block_sizes_tokens=(32, 32),
            host=host,
        )
        self._running: dict[str, tuple[Any, asyncio.Task[Any]]] = {}

    async def greet(self, layout: str) -> None:
        """Shake hands with a memory."""
        await self._converter.greet(_layout_of(layout))

    async def begin(self, layout: str, block_ids: list[int]) -> dict[str, str]:
        """Take an order; where the target has to announce itself."""
        from deployments.messages import HandoffOrder, Ticket

        source = _layout_of(layout)
        tokens = len(block_ids) * source.block_size_tokens
        ticket = Ticket(
            ticket_id=uuid.uuid4().hex,
            request_id="r",
            token_ids=tuple(range(tokens)),
            block_ids=tuple(block_ids),
            lease_s=60.0,
            layout=source,
        )
        order = HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=tokens)
        stream = self._converter.convert(order)
        address = await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        self._running[order.handoff_id] = stream, task
        return {"handoff_id": order.handoff_id, "address": address.address}

    async def finish(self, handoff_id: str) -> dict[str, Any]:
        """Wait for a handoff's report."""
        from dataclasses import asdict

        stream, task = self._running.pop(handoff_id)
        report = await task
        await stream.aclose()
        return asdict(report)

    async def cpu_s(self) -> float:
        """Processor time of this process so far."""
        return _cpu_s()

    async def close(self) -> None:
        await self._converter.close()


def _layout_of(text: str) -> Any:
    from deployments.messages import decode

    return decode(base64.b64decode(text))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def main() -> None:
    """`data_path_node.py memory|mapper HOST JSON-OPTIONS`, until standard input ends."""
    # Before anything prints.
    to = answers()
    kind, host, options = sys.argv[1:]
    made: Role = {"memory": Memory, "mapper": MapperNode}[kind](host, **json.loads(options))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        found = await getattr(made, order.pop("do"))(**order)
        print(json.dumps(found), file=to, flush=True)
    await made.close()


if __name__ == "__main__":
    asyncio.run(main())
