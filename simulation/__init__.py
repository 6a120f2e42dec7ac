"""Crash histories: production's members and trainer live through what a seed decides, and a judge looks at the store.

Real: claims, sessions, journal, assembly, batches, the planner - the code under storage/ and tasks/ as it is deployed.
Exchanged: the clock (virtual_time.py; simulated_session.py lets a session wait in it), the engine
(simulated_machine.py, which is the scripted engine with time, stragglers and deaths), and the store (in memory, behind
faults). The trainer takes no gradient step (simulated_trainer.py). simulated_history.py draws a history from its seed;
simulated_crew.py plays it. Judges: judge.py and judge_absence.py read the objects in the store alone, apart from the
code that reads them in production; ledger.py notes every request in true order and the rules that it breaks;
undisturbed.py says what the responses would have been. `python -m benchmarks.histories` plays seeds by the hundred.
"""
