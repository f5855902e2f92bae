"""Tests of models that are split over ranks; a package, so that its modules may be called as those of other folders."""
