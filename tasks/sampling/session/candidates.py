"""Candidates: the unfinished responses of a member, from which a taker chooses."""

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from tasks.crew_model.rebalance import Candidate


def candidates_of(reader: JournalReader, holder: str, taker: str, *, acting: bool) -> list[Candidate]:
    """The unfinished responses of `holder` by its journal; `acting` includes responses whose turn awaits an answer.

    A taker must make the calls of such a turn before decoding its response.
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
