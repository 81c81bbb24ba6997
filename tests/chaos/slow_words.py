"""What a reward process is asked in the chaos test: a number, after a while."""

import time


def letters_of(number: int, seconds: float) -> float:
    time.sleep(seconds)
    return float(number)
