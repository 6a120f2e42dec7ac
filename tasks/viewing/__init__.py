"""Reading a run: its responses as text, in a terminal and on a page in the browser.

It reads what the run's directory holds, live or finished, and writes nothing to it.
"""
