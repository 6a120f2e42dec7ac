"""The same tasks on Flyte 2, whose SDK is the package `flyte`. A run may be advanced by either SDK in turn."""
