"""Conversion of TRL's and verl's configurations: reading settings, translating settings, and listing omissions.

Scripts are parsed and never executed. `tasks.configuration.other_names` holds the names, this package the meanings.
"""
