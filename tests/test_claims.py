"""The claims table lists every claim, measured or not."""

import pytest

from mechkv.claims import CLAIMS, ClaimsTable, Finding
from mechkv.errors import InputError


def test_unmeasured_claims_are_listed_as_such() -> None:
    rows = ClaimsTable([Finding("C3", "partly", "7 orders", "none", "tiny", "here")]).rows()
    assert [row["claim"] for row in rows] == list(CLAIMS)
    assert {row["claim"]: row["verdict"] for row in rows} == dict.fromkeys(CLAIMS, "not measured") | {"C3": "partly"}
    assert all(row["paper"] for row in rows)


def test_several_findings_of_one_claim_are_all_kept() -> None:
    found = [Finding("C1", "partly", str(i), "", "tiny", "here") for i in range(3)]
    assert [row["ours"] for row in ClaimsTable(found).rows() if row["claim"] == "C1"] == ["0", "1", "2"]


@pytest.mark.parametrize(("claim", "verdict"), [("C9", "partly"), ("C1", "confirmed")])
def test_unknown_claims_and_verdicts_are_refused(claim: str, verdict: str) -> None:
    with pytest.raises(InputError):
        Finding(claim, verdict, "", "", "", "")
