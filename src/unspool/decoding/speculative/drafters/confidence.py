"""When a drafting model had better stop: a threshold on its own confidence, moved by what was accepted."""

from __future__ import annotations

from collections import deque

MEMORY = 256  # guesses that the threshold is found from
FEWEST = 6  # guesses before it moves
COST_OF_STOPPING_EARLY = 3.0  # beside that of a wrong guess: a pass of the model outweighs one of its drafter


class Confidence:
    """The probability below which a guess is the draft's last; 0 never stops.

    Each checked guess says how sure the drafter was and whether it was right. The threshold is put where it would have
    cost least: the share of wrong guesses it lets pass, and three times the share of right ones it cuts off.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._is_on = threshold > 0
        self._seen: deque[tuple[float, bool]] = deque(maxlen=MEMORY)

    def is_enough(self, probability: float) -> bool:
        """Whether to go on after a guess of this probability."""
        return not self._is_on or probability >= self.threshold

    def learn(self, probabilities: list[float], num_right: int, is_next_wrong: bool) -> None:
        """Hear of one row's draft: so many guesses were right, and the one after them wrong, or never looked at."""
        if not self._is_on:
            return
        self._seen.extend((one, True) for one in probabilities[:num_right])
        if is_next_wrong and num_right < len(probabilities):
            self._seen.append((probabilities[num_right], False))
        self._adapt()

    def _adapt(self) -> None:
        num_right = sum(is_right for _, is_right in self._seen)
        num_wrong = len(self._seen) - num_right
        if len(self._seen) < FEWEST or not num_right or not num_wrong:
            return
        # From the surest guess down: the threshold lets one more pass each time.
        passed_right = passed_wrong = 0
        best = (float("inf"), self.threshold)
        for probability, is_right in sorted(self._seen, reverse=True):
            passed_right += is_right
            passed_wrong += not is_right
            cost = passed_wrong / num_wrong + COST_OF_STOPPING_EARLY * (1 - passed_right / num_right)
            best = min(best, (cost, probability))
        self.threshold = best[1]
