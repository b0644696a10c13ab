"""PURE. Policies: who gets which nodes, decided by plain functions of a snapshot."""
