"""The compute we rent: pools of machines, their prices, the notice that one will be taken away.

Must not know tasks or storage. flytekit is imported in pools.py and images.py only.
"""
