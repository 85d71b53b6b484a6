"""The result of `logmirror torture`, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.simulation.simulate import Result
    from logmirror.testing.checker import Anomaly
    from logmirror.torture.session import RealResult


@dataclass
class Finding:
    """One anomaly, and the command that reproduces it."""

    where: str
    """The simulated run, or the replica."""

    code: str
    example: str
    replay: str
    """The command that repeats the run."""


@dataclass
class Verdict:
    """The result of both parts."""

    seed: int
    seeds: int = 0
    simulated_records: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of simulated faults by name."""

    seconds: float = 0
    """Duration of the simulation."""

    findings: list[Finding] = field(default_factory=list)
    anomalies: Counter[str] = field(default_factory=Counter)
    real: RealResult | None = None

    @property
    def is_clean(self) -> bool:
        """Whether there is no anomaly."""
        return not self.findings

    def simulated(self, result: Result, replay: str) -> None:
        """Add the result of one simulated run."""
        self.seeds += 1
        self.simulated_records += result.records
        self.faults.update(result.happened)
        self._add([(str(result.plan), each) for each in result.anomalies], replay)

    def tortured(self, result: RealResult, replay: str) -> None:
        """Add the result of the real processes."""
        self.real = result
        self._add(result.anomalies, replay)

    def _add(self, anomalies: list[tuple[str, Anomaly]], replay: str) -> None:
        for where, anomaly in anomalies:
            self.anomalies[anomaly.code] += anomaly.count
            self.findings.append(Finding(where, anomaly.code, anomaly.example, replay))

    def to_json(self) -> dict[str, object]:
        """Return the result for `--format json`."""
        real = self.real
        return {
            "clean": self.is_clean,
            "seed": self.seed,
            "anomalies": dict(sorted(self.anomalies.items())),
            "first": vars(self.findings[0]) if self.findings else None,
            "simulation": {
                "seeds": self.seeds,
                "records": self.simulated_records,
                "faults": dict(sorted(self.faults.items())),
                "seconds": round(self.seconds, 1),
                "rate_below": _bound(self.seeds),
            },
            "real": real
            and {
                "trials": real.trials,
                "kills": real.kills,
                "missed": real.missed,
                "records": real.records,
                "left_out": real.left_out,
                "seconds": round(real.seconds, 1),
                "rate_below": _bound(real.trials),
            },
        }

    def lines(self) -> Iterator[str]:
        """Yield the result for `--format text`, line by line."""
        if self.seeds:
            faults = ", ".join(f"{count} {name}" for name, count in self.faults.most_common())
            yield (
                f"simulation: {self.seeds} seeds, {self.simulated_records} records, "
                f"{self.seconds:.1f} s"
            )
            yield f"  faults: {faults or 'none'}"
            yield from self._rate(self.seeds, "seed")
        if self.real is not None:
            real = self.real
            yield (
                f"real processes: {real.trials} trials, {real.kills} processes killed, "
                f"{real.records} records, {real.seconds:.1f} s"
            )
            if real.missed:
                yield f"  trials without effect: {real.missed}"
            yield from (f"  not tested: {reason}" for reason in real.left_out)
            yield from self._rate(real.trials, "trial")
        for code, count in sorted(self.anomalies.items(), key=lambda item: int(item[0][1:])):
            yield f"{code}: {count}"
        if self.findings:
            first = self.findings[0]
            yield f"first: {first.where}: {first.code}: {first.example}"
            yield f"reproduce: {first.replay}"
        yield f"seed {self.seed}"
        yield "no record was lost, duplicated or changed" if self.is_clean else "ANOMALIES FOUND"

    def _rate(self, trials: int, what: str) -> Iterator[str]:
        if self.is_clean and trials:
            yield (
                f"  0 anomalies in {trials} {what}s: rate below {_bound(trials):.2%} "
                "at 95 % confidence (rule of three)"
            )


def _bound(trials: int) -> float | None:
    """Return the rule of three: 0 anomalies in N runs bound the rate by 3/N at 95 %."""
    return round(min(3 / trials, 1), 6) if trials else None
