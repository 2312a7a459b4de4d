"""Tests of models, and cases that tests on a GPU share."""
