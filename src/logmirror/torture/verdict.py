"""What a torture found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.simulation.simulate import Result
    from logmirror.testing.checker import Anomaly
    from logmirror.torture.real import RealResult


@dataclass
class Finding:
    """The first anomaly of a seed or a copy."""

    where: str
    code: str
    example: str
    replay: str
    """The command that does it again."""


@dataclass
class Verdict:
    """All that a torture found."""

    seed: int
    seeds: int = 0
    simulated_records: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """How often each class happened in the simulation."""

    seconds: float = 0
    findings: list[Finding] = field(default_factory=list)
    anomalies: Counter[str] = field(default_factory=Counter)
    real: RealResult | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def simulated(self, result: Result, replay: str) -> None:
        """Take the result of one seed in."""
        self.seeds += 1
        self.simulated_records += result.records
        self.faults.update(result.happened)
        self._found([(str(result.plan), each) for each in result.anomalies], replay)

    def tortured(self, result: RealResult, replay: str) -> None:
        """Take the result of the real processes in."""
        self.real = result
        self._found(result.anomalies, replay)

    def _found(self, anomalies: list[tuple[str, Anomaly]], replay: str) -> None:
        for where, anomaly in anomalies:
            self.anomalies[anomaly.code] += anomaly.count
            self.findings.append(Finding(where, anomaly.code, anomaly.example, replay))

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON."""
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
                "points_missed": real.missed,
                "records": real.records,
                "left_out": real.left_out,
                "seconds": round(real.seconds, 1),
                "rate_below": _bound(real.trials),
            },
        }

    def lines(self) -> Iterator[str]:
        """The verdict as text."""
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
                f"real processes: {real.trials} trials, {real.kills} killed, "
                f"{real.records} records, {real.seconds:.1f} s"
            )
            if real.missed:
                yield f"  crash points that were not reached in time: {real.missed}"
            yield from (f"  left out: {reason}" for reason in real.left_out)
            yield from self._rate(real.trials, "trial")
        for code, count in sorted(self.anomalies.items(), key=lambda item: int(item[0][1:])):
            yield f"{code}: {count}"
        if self.findings:
            first = self.findings[0]
            yield f"first: {first.where}: {first.code}: {first.example}"
            yield f"again: {first.replay}"
        yield f"seed {self.seed}"
        yield "nothing was lost, doubled or changed" if self.is_clean else "ANOMALIES"

    def _rate(self, trials: int, what: str) -> Iterator[str]:
        if self.is_clean and trials:
            yield (
                f"  0 anomalies in {trials}: fewer than {_bound(trials):.2%} of such "
                f"{what}s show one, at 95 % confidence (rule of three)"
            )


def _bound(trials: int) -> float | None:
    """The rule of three: 0 in N means a rate below 3/N, at 95 %."""
    return round(min(3 / trials, 1), 6) if trials else None
