"""Exercises: stubs made from the library, the runner that judges them, a learner's progress.

In a notebook, the same verdict as on the command line:

    from minitransformer.course import check

    check("01.3", softmax_backward)
"""

from collections.abc import Callable
from typing import Any


def check(number: str, *written: Callable[..., Any] | Any) -> bool:
    """Judge your functions for a task (or the suite in which you stated properties), print the
    verdict, and say whether it is passed.

    Raises
    ------
    ValueError
        If there is no such task, or one of its functions is missing.
    """
    from minitransformer.course.judge import headline, judge_functions, report
    from minitransformer.course.tasks import find_task

    task = find_task(number)
    print(headline(task))
    outcome = judge_functions(task, written)
    print("\n".join(report(task, outcome)))
    return outcome.passed
