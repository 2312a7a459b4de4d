"""Tests of compiled code for CPUs."""
