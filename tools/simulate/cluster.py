"""The cluster: policies, instances, streams and the messages between them, in virtual time.

Everything is as over NATS, by the same messages, and takes `Network`'s time for each way:
1. REQUESTS and PROGRESS: a write goes to the server, the answer comes back; readers hear what was stored. A record that
   does not continue from the last one is refused.
2. Assignments and releases are asked and answered. Reports, statuses, forecasts, thresholds and load states are said;
   one message reaches all its readers at one time.
3. Policies decide in no time, but forecasts take `predict_s` for each batch, as all that is due is forecast at once.
4. The gateway needs `gateway_s` for a call before its request is written. The answer is there when the gateway reads
   the final record.
Only where instances come and go (fleet.py) anything is lost: elsewhere a request that changes its attempt is a fault of
the program.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from contracts import messages as m
from contracts.messages import GenerateRequest, ProgressRecord
from services.costs import LatencyProfile
from services.denoiser.batching import BatchLimits
from services.profile import Profile, Tier
from services.scheduler import events as s
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.policy import Predict, StepPredictor
from services.threshold_controller import events as t
from tools.simulate.clock import Clock, Network, Timer
from tools.simulate.denoising import Behaviour, Course
from tools.simulate.fleet import Fleet, FleetSetting
from tools.simulate.forecasts import CourseOf, Forecaster
from tools.simulate.instance import Instance, InstanceSettings
from tools.simulate.results import Outcome
from tools.simulate.workload import Arrival

GATEWAY = "gateway"
_GATEWAY_EVERY_S = 1.0
_READY_AT = 1.0  # the first request comes, all services have begun
_MAX_PREDICTED = 256  # requests forecast at once, as the live service has it
_MAX_RECOMPUTE_TOKENS = 2048  # of a pass, as the live instance has it


class SchedulingPolicy(Protocol):
    """The live scheduler, or what stands in for it."""

    def handle(self, event: s.Event, now: float) -> list[s.Command]: ...


class ThresholdPolicy(Protocol):
    """The live threshold-controller, or what stands in for it."""

    def handle(self, event: t.Event, now: float) -> list[t.Command]: ...


class Setting(NamedTuple):
    """What the cluster is made of, whatever its policies."""

    profile: Profile
    latency: LatencyProfile
    tp_degrees: tuple[int, ...]  # of each instance; those at the beginning, where there is a fleet
    kv_tokens: int  # of each
    tier: Tier = "default"  # of all requests: its quality floor is theirs
    slo_s: float | None = None
    delay_s: float = 0.0005
    jitter_s: float = 0.0005
    gateway_s: float = 0.0023
    step_overhead_s: float = 0.0005
    predict_s: float = 0.002
    pass_noise: float = 0.0
    latency_ratio: float = 1.0  # of all instances: measured over profiled time of passes
    seed: int = 0
    fleet: FleetSetting | None = None  # None: the instances are there from beginning to end

    @property
    def num_devices(self) -> int:
        return sum(self.tp_degrees) if self.fleet is None else self.fleet.num_devices


class Policies(NamedTuple):
    """Who decides."""

    scheduler: SchedulingPolicy
    thresholds: ThresholdPolicy | None = None  # None: thresholds stay as they are
    forecaster: Callable[[CourseOf], Forecaster] | None = None  # given a look at the courses; None: nobody forecasts
    refresh_tokens: int = 1  # a forecast is renewed once so many more tokens are committed


class Cluster:
    """One run: `run` it once."""

    def __init__(self, setting: Setting, policies: Policies, behaviour: Behaviour, arrivals: Iterable[Arrival]) -> None:
        self.clock = Clock()
        self.setting, self._policies, self._behaviour = setting, policies, behaviour
        self._arrivals = iter(arrivals)
        self._network = Network(self.clock, Random(f"{setting.seed}/network"), setting.delay_s, setting.jitter_s)
        self._courses: dict[str, Course] = {}
        self._prompts: dict[int, list[int]] = {}  # made-up tokens, by length
        self._records: dict[str, tuple[int, ProgressRecord]] = {}  # PROGRESS: sequence and record of open requests
        self._request_seq = self._record_seq = 0
        self._open: dict[str, tuple[GenerateRequest, int]] = {}  # with the prompt's number
        self.outcomes: list[Outcome] = []  # in order of their ends
        self.load_states: list[m.LoadState] = []
        self.num_arrived = 0
        self._all_arrived = False
        self._scheduler_timer = Timer(self.clock, lambda: self._tell_scheduler(s.Tick()))
        self._controller_timer = Timer(self.clock, lambda: self._tell_controller(t.Tick()))
        self.instances: dict[str, Instance] = {}  # that run
        self.all_instances: list[Instance] = []  # and those that ran
        self.fleet: Fleet | None = None
        if setting.fleet is not None:
            self.fleet = Fleet(self, setting.fleet, setting.tp_degrees, setting.profile, setting.latency)
        else:
            for number, degree in enumerate(setting.tp_degrees):
                self._add(f"i{number:03}", degree)
        self._predictor = _Predictor(self, policies, setting.predict_s) if policies.forecaster else None

    # --- instances ------------------------------------------------------------------------------------------------

    def _add(self, instance_id: str, tp_degree: int) -> Instance:
        settings = _settings_of(self.setting, instance_id, tp_degree)
        if self._policies.thresholds is None and self._policies.forecaster is None:
            settings = settings._replace(entries_are_read=False)
        instance = Instance(settings, self, self.clock, Random(f"{self.setting.seed}/{instance_id}"))
        self.instances[instance_id] = instance
        self.all_instances.append(instance)
        return instance

    def start(self, instance_id: str, tp_degree: int) -> Instance:
        """It runs from now on."""
        instance = self._add(instance_id, tp_degree)
        instance.begin_statuses(self.clock.now)
        return instance

    def end(self, instance: Instance) -> None:
        """It runs no more, whatever it holds."""
        instance.gone = True
        del self.instances[instance.id]

    def note_exit(self, instance: Instance, detail: str) -> None:
        assert self.fleet is not None, "nobody else stops instances"
        self.end(instance)
        self.fleet.note_exit(instance, detail)

    def announce_lost(self, instance_id: str) -> None:
        self._network.send(("agent", instance_id), self._hear_lost, instance_id)

    def _hear_lost(self, instance_id: str) -> None:
        self._tell_scheduler(s.InstanceExited(instance_id))
        self._tell_controller(t.InstanceExited(instance_id))

    def ask_to_drain(self, instance_id: str) -> None:
        self._network.send((instance_id, "drain"), self._tell_scheduler, s.DrainAsked(instance_id))

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, on_progress: Callable[["Cluster"], object] | None = None) -> list[Outcome]:
        """Until all requests have ended. `on_progress` is called after each."""
        self._begin()
        told = 0
        while not self._all_arrived or self._open:
            if not self.clock.step():
                raise RuntimeError(f"nothing happens any more, and {len(self._open)} requests are open")
            if on_progress is not None and len(self.outcomes) > told:
                told = len(self.outcomes)
                on_progress(self)
        return self.outcomes

    def _begin(self) -> None:
        for number, instance in enumerate(self.instances.values()):
            instance.begin_statuses(number / len(self.instances))  # spread over a second
        if self.fleet is not None:
            self.fleet.begin()
        self._tell_scheduler(s.CaughtUp())
        self._tell_controller(t.CaughtUp())
        self._beat()
        self._plan_arrival()

    def _beat(self) -> None:
        self._tell_scheduler(s.GatewaySeen(GATEWAY))
        self.clock.at(self.clock.now + _GATEWAY_EVERY_S, self._beat)

    # --- the gateway ----------------------------------------------------------------------------------------------

    def _plan_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._all_arrived = True
        else:
            self.clock.at(_READY_AT + arrival.at, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        request = self._request(arrival)
        self.num_arrived += 1
        self._courses[request.request_id] = self._behaviour.start(arrival.prompt)
        self._open[request.request_id] = request, arrival.prompt
        self.clock.at(
            self.clock.now + self.setting.gateway_s, self._network.send, "gateway>", self._store_request, request
        )
        self._plan_arrival()

    def _request(self, arrival: Arrival) -> GenerateRequest:
        profile, now = self.setting.profile, self.clock.now
        length = self._behaviour.prompt_tokens(arrival.prompt)
        return GenerateRequest(
            request_id=f"r{arrival.seed}",
            gateway_id=GATEWAY,
            model=profile.model,
            prompt_ids=self._prompts.setdefault(length, [0] * length),
            max_tokens=self._behaviour.max_tokens(arrival.prompt),
            block_size=profile.decoding.block_size,
            cache=profile.decoding.cache,
            blocks_ahead=profile.decoding.blocks_ahead,
            created_at=now,
            expires_at=now + profile.limits.time_limit_s,
            ignore_eos=self._behaviour.ignore_eos,
            floor=profile.quality_floor.get(self.setting.tier, 0.0),
            deadline_at=None if self.setting.slo_s is None else now + self.setting.slo_s,
        )

    def _store_request(self, request: GenerateRequest) -> None:
        self._request_seq += 1
        self._network.send("REQUESTS>", self._hear_request, request, self._request_seq)

    def _hear_request(self, request: GenerateRequest, seq: int) -> None:
        deadline = request.deadline_at
        if self.fleet is not None:
            self.fleet.hear_request(request)
        self._tell_scheduler(s.RequestSeen(request, seq, request.created_at, request.expires_at, deadline))
        self._tell_controller(t.RequestSeen(request, seq, request.expires_at, deadline))

    def _note_end(self, record: ProgressRecord) -> None:
        found = self._open.pop(record.request_id, None)
        if found is None:
            return
        request, prompt = found
        course = self._courses.pop(record.request_id)
        correctness = course.correctness() if record.state == "finished" else None
        self.outcomes.append(Outcome.of(request, record, prompt, correctness, self.clock.now))

    # --- the streams ----------------------------------------------------------------------------------------------

    def write(self, instance: Instance, record: ProgressRecord, after_seq: int) -> None:
        self._network.send((instance.id, ">"), self._store_workers, instance, record, after_seq)

    def _store_workers(self, instance: Instance, record: ProgressRecord, after_seq: int) -> None:
        seq = self._store_record(record, after_seq)
        if seq is None:
            self._network.send((">", instance.id), instance.note_refused, record)
        else:
            self._network.send((">", instance.id), instance.note_stored, record, seq)

    def _store_record(self, record: ProgressRecord, after_seq: int) -> int | None:
        """Its sequence; None: another one stands (rule 1)."""
        assert record.attempt == 1 or self.fleet is not None, f"{record.request_id} was taken for lost"
        if self._records.get(record.request_id, (0, record))[0] != after_seq:
            return None
        self._record_seq += 1
        self._records[record.request_id] = self._record_seq, record
        self._network.send("PROGRESS>", self._hear_record, record, self._record_seq)
        return self._record_seq

    def _hear_record(self, record: ProgressRecord, seq: int) -> None:
        if record.is_final:
            self._note_end(record)
        self._tell_scheduler(s.RecordSeen(record, seq))
        self._tell_controller(t.RecordSeen(record, seq))

    def _store_schedulers(self, command: s.WriteRecord) -> None:
        record = replace(command.record, written_at=self.clock.now)
        seq = self._store_record(record, command.after_seq)
        if seq is not None:
            answer: s.Event = s.RecordSeen(record, seq)
        else:
            stands_at, stands = self._records[record.request_id]
            answer = s.WriteOvertaken(record.request_id, command.after_seq, s.RecordSeen(stands, stands_at))
        self._network.send(">scheduler", self._tell_scheduler, answer)

    # --- what instances say ---------------------------------------------------------------------------------------

    def course_of(self, request_id: str) -> Course:
        return self._courses[request_id]

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def say_report(self, report: m.Report) -> None:
        self._network.send((report.instance_id, "said"), self._hear_report, report)

    def _hear_report(self, report: m.Report) -> None:
        if self._predictor is not None:
            self._predictor.hear(report)
        self._tell_controller(t.ReportSeen(report))

    def say_status(self, status: m.InstanceStatus) -> None:
        self._network.send((status.instance_id, "said"), self._hear_status, status)

    def _hear_status(self, status: m.InstanceStatus) -> None:
        self._tell_scheduler(s.StatusSeen(status))
        self._tell_controller(t.StatusSeen(status))

    def say_forecast(self, forecast: m.Forecast) -> None:
        self._network.send("predictor>", self._tell_controller, t.ForecastSeen(forecast))

    # --- what the scheduler says ----------------------------------------------------------------------------------

    def _tell_scheduler(self, event: s.Event) -> None:
        for command in self._policies.scheduler.handle(event, self.clock.now):
            self._do_for_scheduler(command)

    def _do_for_scheduler(self, command: s.Command) -> None:
        match command:
            case s.SendAssign():
                self._network.send(("scheduler", command.instance_id), self._assign, command)
            case s.SendRelease():
                self._network.send(("scheduler", command.instance_id), self._release, command)
            case s.WriteRecord():
                self._network.send("scheduler>", self._store_schedulers, command)
            case s.SendCancel():
                for instance in self.instances.values():
                    self._network.send(("scheduler", instance.id), instance.cancel, command.request_id)
            case s.AskStatus():
                self._ask_statuses("scheduler")
            case s.WakeAt():
                self._scheduler_timer.set(command.at)
            case s.Purge():
                self._records.pop(command.request_id)
            case s.Wait():
                pass
            case _:
                raise RuntimeError(f"nobody carries {command} out")

    def _assign(self, command: s.SendAssign) -> None:
        assign, instance = command.assign, self.instances.get(command.instance_id)
        answer: s.Answer = "undelivered" if instance is None else instance.assign(assign)
        event = s.AssignAnswered(command.instance_id, assign.request.request_id, assign.attempt, answer)
        self._network.send((command.instance_id, "answers"), self._tell_scheduler, event)

    def _release(self, command: s.SendRelease) -> None:
        release, instance = command.release, self.instances.get(command.instance_id)
        answer: s.Answer = "undelivered" if instance is None else instance.release(release)
        event = s.ReleaseAnswered(command.instance_id, release.request_id, release.attempt, answer)
        self._network.send((command.instance_id, "answers"), self._tell_scheduler, event)

    def _ask_statuses(self, who: str) -> None:
        for instance in self.instances.values():
            self._network.send((who, "ask", instance.id), instance.say_status)

    # --- what the threshold-controller says -----------------------------------------------------------------------

    def _tell_controller(self, event: t.Event) -> None:
        if self._policies.thresholds is None:
            return
        for command in self._policies.thresholds.handle(event, self.clock.now):
            self._do_for_controller(command)

    def _do_for_controller(self, command: t.Command) -> None:
        match command:
            case t.SendThresholds() if command.instance_id not in self.instances:
                pass  # nobody listens
            case t.SendThresholds():
                entries = [
                    m.ThresholdEntry(request_id=d.request_id, attempt=d.attempt, threshold=d.threshold)
                    for d in command.decisions
                ]
                link = "controller", command.instance_id
                self._network.send(link, self.instances[command.instance_id].turn, m.Thresholds(entries=entries))
            case t.SendLoadState():
                state = replace(command.state, sent_at=self.clock.now)
                self.load_states.append(state)
                self._network.send("controller>", self._tell_scheduler, s.LoadStateSeen(state))
            case t.AskStatus():
                self._ask_statuses("controller")
            case t.WakeAt():
                self._controller_timer.set(command.at)
            case t.Settled():
                pass
            case _:
                raise RuntimeError(f"nobody carries {command} out")

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        for instance in self.instances.values():
            instance.check_invariants()


class _Predictor:
    """The step-predictor's service: one batch at a time, of the newest reports (rule 3)."""

    def __init__(self, cluster: Cluster, policies: Policies, predict_s: float) -> None:
        assert policies.forecaster is not None
        self._cluster, self._predict_s = cluster, predict_s
        self._policy = StepPredictor(StepPredictorConfig(), policies.refresh_tokens)
        self._forecaster = policies.forecaster(cluster.course_of)
        self._thresholds = cluster.setting.profile.decoding.thresholds
        self._due: dict[str, Predict] = {}  # by request
        self._predicting = False

    def hear(self, report: m.Report) -> None:
        for command in self._policy.handle(report, self._cluster.clock.now):
            self._due[command.request.request_id] = command
        self._go_on()

    def _go_on(self) -> None:
        if self._due and not self._predicting:
            self._predicting = True
            batch = [self._due.pop(request_id) for request_id in list(self._due)[:_MAX_PREDICTED]]
            self._cluster.clock.at(self._cluster.clock.now + self._predict_s, self._predict, batch)

    def _predict(self, batch: list[Predict]) -> None:
        self._predicting = False
        batch = [command for command in batch if self._cluster.is_open(command.request.request_id)]
        forecasts = self._forecaster.forecast([command.request for command in batch])
        by_instance: dict[str, list[m.RequestForecast]] = {}
        for command, forecast in zip(batch, forecasts, strict=True):
            by_instance.setdefault(command.instance_id, []).append(forecast)
        for instance_id, entries in by_instance.items():
            now = self._cluster.clock.now
            self._cluster.say_forecast(m.Forecast(instance_id, now, self._thresholds, entries))
        self._go_on()


def _settings_of(setting: Setting, instance_id: str, tp_degree: int) -> InstanceSettings:
    engine = setting.profile.engine
    limits = BatchLimits(
        max_batch_tokens=engine.max_pass_tokens,
        max_recompute_tokens=min(engine.max_pass_tokens, _MAX_RECOMPUTE_TOKENS),
    )
    return InstanceSettings(
        instance_id=instance_id,
        model=setting.profile.model,
        tp_degree=tp_degree,
        max_requests=engine.max_requests,
        kv_tokens=setting.kv_tokens,
        limits=limits,
        cost=setting.latency.cost(tp_degree),
        step_overhead_s=setting.step_overhead_s,
        pass_noise=setting.pass_noise,
        latency_ratio=setting.latency_ratio,
    )
