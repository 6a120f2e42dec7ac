"""Reading a run: responses as text, in a terminal and on a page in the browser.

A reader reads the directory of a live or a finished run, and writes nothing to the run.
"""
