"""Print which reference outputs pass, fail and are to come: `make conformance`."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

from tests.conformance.cases import read_cases
from tests.conformance.test_goldens import test_case_matches


def main() -> int:
    """Run every case that can run and print the table."""
    passed: Counter[str] = Counter()
    failed: dict[str, list[str]] = defaultdict(list)
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    models: dict[str, int] = Counter()
    for case in read_cases():
        models[case.model] += 1
        if case.to_come is not None:
            waiting[case.to_come][case.model] += 1
            continue
        try:
            test_case_matches(case)
            passed[case.model] += 1
        except Exception as error:  # a table of everything must survive anything
            failed[case.model].append(f"{case.name}: {type(error).__name__}")
    print(f"{'model':<12}{'cases':>7}{'pass':>7}{'fail':>7}{'to come':>9}")
    for model, total in models.items():
        done, bad = passed[model], len(failed[model])
        print(f"{model:<12}{total:>7}{done:>7}{bad:>7}{total - done - bad:>9}")
    total, done, bad = sum(models.values()), passed.total(), sum(map(len, failed.values()))
    print(f"{'all':<12}{total:>7}{done:>7}{bad:>7}{total - done - bad:>9}\n")
    print("still to come, by what they need:")
    for why, counts in sorted(waiting.items(), key=lambda item: -item[1].total()):
        print(f"  {counts.total():>4}  {why}")
    for model, names in failed.items():
        for name in names:
            print(f"FAILED {model} {name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
