"""The contract that every plugin keeps, as a suite that its author runs from pytest.

    from everstep.sdk.testing import check_contract
    from everstep_entropy import EntropyCollector

    def test_the_contract() -> None:
        check_contract(EntropyCollector)

It is the same suite that the built-in plugins pass. Actions and notifiers are never called by it:
they would act.
"""

from everstep.sdk.testing.contract import ContractError, broken_rules, check_contract

__all__ = ["ContractError", "broken_rules", "check_contract"]
