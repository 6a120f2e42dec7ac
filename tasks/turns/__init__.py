"""Turns: conversations in which the policy calls tools or acts in an environment, and what a member does for them.

A policy's turn ends with a stop token. Its text is parsed (`conversation`), its calls are performed in child processes
(`opened_environments`), and the answer's tokens follow in the journal. A session knows only the protocol in
`environments`.
"""
