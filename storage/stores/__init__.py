"""Object stores: the five verbs, each kind of store, and what wraps one."""
