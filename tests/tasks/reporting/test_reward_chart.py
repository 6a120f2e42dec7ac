from storage.records.evaluation_records import EvaluationRecord
from tasks.reporting.reward_chart import reward_chart


def test_evaluations_stand_on_the_chart_of_the_reward():
    def evaluated(digest, version, value):
        metrics = {"val/reward/mean@4": value, "val/reward/mean@4/low": 0.0, "val/pass@1": 1.0}
        return EvaluationRecord(
            weight_version=version, digest=digest, settings={}, metrics=metrics, prompts=(), created_at_s=0.0
        )

    history = [(0.0, 0.1), (1.0, 0.2)]
    one = reward_chart(history, [evaluated("a" * 32, 0, 0.05), evaluated("a" * 32, 2, 0.3)])
    assert ">evaluation<" in one
    assert one.count("<circle") == 4
    two = reward_chart(history, [evaluated("a" * 32, 0, 0.05), evaluated("b" * 32, 2, 0.3)])
    assert ">evaluation<" in two
    assert ">evaluation bbbbbb<" in two
