"""Python imports this at its start where ``second_runner.py`` has put the folder on its path: so
vLLM's ranks, which are processes of their own, take that runner, too."""

from tests.support.second_runner import take_second_runner

take_second_runner()
