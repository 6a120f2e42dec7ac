"""Candidates: the unfinished responses of one member from which a taker chooses."""

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from tasks.crew_model.rebalance import Candidate


def candidates_of(reader: JournalReader, holder: str, taker: str, *, acting: bool) -> list[Candidate]:
    """The unfinished responses of a member, as its journal shows them; `acting`: also those owed an answer.

    A living member makes the call of a response that it took with an answer owed before it decodes the response.
    """
    book, found = reader.book, []
    for response in book.holdings().get(holder, ()):
        assembled = reader.assemble(response)
        owner = book.owner(response)
        if assembled.finish.ends_response or owner is None or (assembled.owes and not acting):
            continue
        begun = bool(assembled.lineage) and assembled.lineage[-1].epoch == owner.epoch
        found.append(
            Candidate(
                response=response,
                length=len(assembled.token_ids),
                begun=begun,
                released=begun and assembled.finish == Finish.RELEASED,
                held_before=taker in book.former_owners(response),
            )
        )
    return found
