"""Crash histories: production's members and trainer live through what a seed decides, and a judge looks at the store.

Real: claims, sessions, journal, assembly, batches, the planner, publication and pulling of weights, conclusion, lease
and sweeps - the code under storage/ and tasks/ as it is deployed. Exchanged: the clock (virtual_time.py;
simulated_session.py lets a session wait in it, one_thread.py does in turn what thread pools do), the engine
(simulated_machine.py, which is the scripted engine with time, stragglers and deaths), and the store (in memory, behind
the faults of simulated_lines.py). The trainer's step is a function of the recorded batches (simulated_step.py).

simulated_history.py draws a history from its seed; simulated_crew.py plays an iteration, with the faults of
simulated_strikes.py; simulated_run.py plays the iterations of a run, one to three, and the tasks of simulated_path.py
between them. Judges: judge.py, judge_absence.py and judge_promises.py read what an iteration wrote, apart from the code
that reads it in production; judge_run.py looks at weights, reports and what the sweeps have left. ledger.py notes every
request in true order and the rules that it breaks; ledger_of_run.py has those of deletion; undisturbed.py says what the
responses would have been. `python -m benchmarks.histories` plays seeds by the hundred.

Fleets have histories of their own (`python -m benchmarks.sharing_histories`): simulated_fleet_history.py draws them,
simulated_fleet.py plays production's hosts with the workers of simulated_workers.py and the members of
simulated_backfill.py, ledger_of_fleet.py notes what happens, and judge_fleet.py judges it.

So have scorers (`python -m benchmarks.scoring_histories`): simulated_scoring.py draws them and plays a crew with the
scorers of simulated_scorer.py, whose teacher is a function of the tokens, and judge_scoring.py judges the scores.
"""
