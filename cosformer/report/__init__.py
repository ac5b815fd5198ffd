"""Rows to tables and figures. Reads rows only: nothing here measures or knows the op."""
