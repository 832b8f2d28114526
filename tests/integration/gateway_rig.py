"""A gateway under test: a small tokenizer, and scheduler and worker played by script over the real bus."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from contracts import subjects
from contracts.messages import Cancel, GatewayStatus, GenerateRequest, ProgressRecord, Reason
from services.bus import Bus, BusTimeout, NatsSettings
from services.gateway.__main__ import _listen, begin, load
from services.gateway.config import GatewayConfig
from services.gateway.http import Gateway
from services.gateway.text import TextCodec, load_codec
from services.progress import Overtaken, write_record
from services.runtime import Runtime
from tests.builders import make_cost, make_record, make_status
from tests.processes import ServiceProcess, free_port
from tests.waiting import until, wait_until

SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>"]
MASK_ID = 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{{ '<|' + role + '|>' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|assistant|>' }}"
)
MODEL = "scripted"
BLOCK = 8


def build_tokenizer() -> Tokenizer:
    """Byte-level: every byte is a token, a few words too; specials first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["hello", "Ġworld", "STOP", "Ġthe"]
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    mask = {"__type": "AddedToken", "content": SPECIALS[2], "special": True}  # one as an object, as they may be
    config = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "mask_token": mask}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    sizes = {"mask_token_id": MASK_ID, "eos_token_id": 1, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def write_profile(folder: Path, *, time_limit_s: float = 60.0, more: str = "") -> Path:
    write_model_folder(folder / "model")
    (folder / "profile.toml").write_text(
        f'model = "{MODEL}"\n{more}\n[decoding]\nblock_size = {BLOCK}\nmax_tokens = 64\n'
        f"[limits]\nmax_context_tokens = 512\nmax_output_tokens = 128\ntime_limit_s = {time_limit_s}\n"
        "[slo_ms]\npriority = 60000.0\n[quality_floor]\nflex = 0.5\n"
    )
    return folder


def load_test_codec(folder: Path) -> TextCodec:
    return load_codec(write_model_folder(folder), MASK_ID)


class Play(NamedTuple):
    """What the scripted worker does with a request."""

    token_ids: Sequence[int]
    finish: str = "eos"  # or "length"
    block_s: float = 0.0  # before each record
    fail: Reason = ""  # after the tokens
    forever: bool = False  # never finishes
    ending: Callable[[], bool] | None = None  # waits for it before the final record


class Cluster:
    """Scheduler and worker in one: writes the records that `script` wants for each request."""

    def __init__(self, bus: Bus, script: Callable[[GenerateRequest], Play]) -> None:
        self.bus = bus
        self.script = script
        self.seen: dict[str, GenerateRequest] = {}
        self.final: dict[str, ProgressRecord] = {}
        self.cancelled_at: dict[str, float] = {}
        self.gateways: set[str] = set()
        self.final_written_at: dict[str, float] = {}
        self.taken_at: dict[str, float] = {}
        self.alive = True
        self._plays: dict[str, asyncio.Task[None]] = {}
        self._others: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.bus.follow(subjects.PROGRESS, "prog.*.*", ProgressRecord, self._on_record)
        await self.bus.follow(subjects.REQUESTS, "req.*", GenerateRequest, self._on_request)
        await self.bus.subscribe("cancel.*", Cancel, self._on_cancel)
        await self.bus.subscribe("status.gateway.*", GatewayStatus, lambda s: self.gateways.add(s.gateway_id))
        self._others.append(asyncio.create_task(self._beat()))
        await self.bus.flush()

    async def stop(self) -> None:
        tasks = [*self._plays.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            if self.alive:
                status = make_status("i-0", model=MODEL, sent_at=time.time())
                await self.bus.publish(subjects.instance_status("i-0"), status)
            await asyncio.sleep(0.2)

    def _on_request(self, request: GenerateRequest, seq: int) -> None:
        self.seen[request.request_id] = request
        self.taken_at[request.request_id] = time.monotonic()
        if request.request_id not in self.final:
            self._plays[request.request_id] = asyncio.create_task(self._play(request))

    def _on_record(self, record: ProgressRecord, seq: int) -> None:
        if record.is_final:
            self.final[record.request_id] = record
            self._others.append(asyncio.create_task(self._purge(record.request_id)))

    async def _purge(self, request_id: str) -> None:
        while True:
            try:
                return await self.bus.purge(subjects.REQUESTS, subjects.request(request_id))
            except BusTimeout:
                continue

    def _on_cancel(self, cancel: Cancel) -> None:
        self.cancelled_at[cancel.request_id] = time.monotonic()
        if (play := self._plays.get(cancel.request_id)) is not None:
            play.cancel()

    async def _play(self, request: GenerateRequest) -> None:
        play = self.script(request)
        tokens = list(play.token_ids)[: request.max_tokens]
        seq, done = 0, 0
        record = make_record(request, holder="i-0", epoch=1, started_at=time.time())
        blocks = [tokens[i : i + BLOCK] for i in range(0, len(tokens), BLOCK)] or [[]]
        try:
            for index, block in enumerate(blocks):
                if play.block_s:
                    await asyncio.sleep(play.block_s)
                done += len(block)
                last = index == len(blocks) - 1
                record = structs.replace(
                    record,
                    token_ids=tokens[:done],
                    confidences=[0.5] * done,
                    blocks_done=index + 1,
                    written_at=time.time(),
                    blocks=[*record.blocks, make_cost()],
                )
                if last and not play.forever:
                    await until(play.ending or (lambda: True), limit_s=60)
                    record = structs.replace(
                        record,
                        state="failed" if play.fail else "finished",
                        reason=play.fail,
                        finish="" if play.fail else play.finish,  # type: ignore[arg-type]
                    )
                    self.final_written_at[request.request_id] = time.monotonic()
                seq = await write_record(self.bus, record, after_seq=seq, limit_s=20)
        except Overtaken:
            return


class Rig(NamedTuple):
    """A running gateway with its scripted cluster."""

    url: str
    gateway: Gateway
    cluster: Cluster
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@asynccontextmanager
async def run_rig(
    nats_url: str,
    folder: Path,
    script: Callable[[GenerateRequest], Play] | None = None,
    *,
    nats: dict[str, Any] | None = None,
    time_limit_s: float = 60.0,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """`script` says "hello world" where the test names none."""
    tokenizer = build_tokenizer()
    profile = write_profile(folder, time_limit_s=time_limit_s)
    config = GatewayConfig(port=0, profile=str(profile), **settings)
    nats_settings = NatsSettings(url=nats_url, **(nats or {}))
    cluster_bus = await Bus.connect(nats_settings, "cluster")
    await cluster_bus.ensure_streams()
    cluster = Cluster(cluster_bus, script or (lambda request: Play(tokenizer.encode("hello world").ids)))
    await cluster.start()
    async with run_gateway(nats_settings, config) as (url, gateway):
        await until(lambda: gateway.service.live_instances)
        try:
            yield Rig(url, gateway, cluster, tokenizer)
        finally:
            await cluster.stop()
    await cluster_bus.close()


@asynccontextmanager
async def run_gateway(nats_settings: NatsSettings, config: GatewayConfig) -> AsyncIterator[tuple[str, Gateway]]:
    """A gateway in this process, as `python -m services.gateway` wires it."""
    bus = await Bus.connect(nats_settings, "gateway")
    runtime = Runtime("gateway", bus)
    loaded = load(config)
    listener = _listen(config.host, config.port)
    gateway, server = await begin(runtime, config, loaded)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"{'https' if loaded.tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}", gateway
    finally:
        gateway.service.draining = True
        server.should_exit = True
        gateway.service.fail_open_calls()
        await asyncio.wait_for(serving, 10)
        await gateway.service.close()
        await runtime.cancel_tasks()
        await bus.close()


class GatewayProcess(ServiceProcess):
    """`python -m services.gateway` on a port of its own."""

    def __init__(self, folder: Path, nats_url: str, **settings: object) -> None:
        """Serves `folder`'s profile if the settings name no other."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        settings = {"port": self.port, "profile": folder / "profile", **settings}
        super().__init__("services.gateway", folder / f"gateway-{self.port}.log", nats_url, **settings)

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.runs, self.log
            try:
                return (await client.get(f"{self.url}/health/ready")).status_code == 200
            except httpx.TransportError:
                return False

        async with httpx.AsyncClient() as client:
            await until(is_ready, "the gateway is ready")


@contextmanager
def rig_in_thread(nats_url: str, folder: Path, script: Callable[[GenerateRequest], Play]) -> Iterator[str]:
    """The URL of a rig that runs in a thread of its own, for tests that block."""
    ready: list[str] = []
    stop = threading.Event()
    failed: list[BaseException] = []

    async def run() -> None:
        async with run_rig(nats_url, folder, script) as rig:
            ready.append(rig.url)
            await asyncio.to_thread(stop.wait)

    def target() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    wait_until(lambda: ready or failed, "the rig runs")
    try:
        if failed:
            raise failed[0]
        yield ready[0]
    finally:
        stop.set()
        thread.join(30)
