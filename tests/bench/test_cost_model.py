"""The server's cost table is what its committed samples say."""

import importlib.util
import pathlib

_spec = importlib.util.spec_from_file_location("cost_model", pathlib.Path(__file__).parent / "cost_model.py")
cost_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cost_model)


def test_the_table_is_the_fit_of_the_samples():
    header, report = cost_model.results()
    assert header == cost_model.TABLE.read_text()
    assert report == cost_model.REPORT.read_text()


def test_nine_samples_in_ten_are_predicted_within_a_factor_of_three():
    for family, rows in cost_model.read()[1].items():
        overhead, factor, logs = cost_model.fit(rows)
        assert len(logs) >= 50 and factor > 0 and overhead >= 0, family
        assert sum(abs(log) < 1.0986 for log in logs) >= 0.9 * len(logs), family
