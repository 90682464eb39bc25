"""Consumers that join at once begin at the right block, and continue correctly after their own epoch.

Epochs have 8 blocks.
"""

from __future__ import annotations

from staging_feeds import Feed, delivered, kinds

from mbaas.core.staging import events as ev
from mbaas.samples.order import ASIDE, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption


def feed_at(block: int, *, ahead: int = 2) -> Feed:
    """Feed where "a" has used all blocks before ``block`` and requests no more."""
    feed = Feed(blocks_per_epoch=8, ahead=ahead, credit=2)
    feed.join("a", asks=False)
    for number in range(block):
        take(feed, "a", number)
    return feed


def take(feed: Feed, name: str, block: int) -> tuple[int, ...]:
    """Let a consumer ask until the block is delivered; return the delivered blocks."""
    given = delivered(feed.ask(name, block))
    while name not in given:
        given = delivered(feed.finish(min(feed.tasks)))
    return given[name]


def join_now(feed: Feed, name: str) -> ev.Admitted:
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join(name, feed.session, now=True)), ev.Admitted)
    return admitted


def resume(feed: Feed, name: str, resumed: Resumption) -> ev.Admitted:
    feed.session += 1
    done = feed.send(ev.Join(name, feed.session, resumed.start, resumed=resumed))
    (admitted,) = kinds(done, ev.Admitted)
    return admitted


def test_who_is_alone_begins_with_an_epoch() -> None:
    admitted = join_now(Feed(blocks_per_epoch=8), "a")
    assert (admitted.cursor, admitted.own_epoch) == (0, OwnEpoch(0, 8, 0))


def test_a_newcomer_begins_where_the_others_are() -> None:
    """It begins at a ready block, so it does not wait; its epoch ends in the middle of the next one."""
    feed = feed_at(4)
    admitted = join_now(feed, "b")
    assert 2 <= admitted.cursor <= 4
    assert feed.core.window.is_ready(admitted.cursor)
    assert admitted.own_epoch == OwnEpoch(admitted.cursor, admitted.cursor + 8, admitted.cursor)
    assert len(feed.core.consumers.cohorts) == 1


def side_by_side(blocks: int, *, ahead: int = 2) -> tuple[Feed, int]:
    """Feed where "b" began in mid-epoch and both have taken `blocks` blocks since; and the first block of "b"."""
    feed = feed_at(4, ahead=ahead)
    begin = join_now(feed, "b").cursor
    for block in range(begin, begin + blocks):
        assert take(feed, "b", block) == (block,)
        if block >= 4:
            take(feed, "a", block)
    return feed, begin


def test_what_follows_is_shuffled_so_that_its_epoch_is_whole() -> None:
    feed, begin = side_by_side(8)
    assert feed.core.epochs.shuffle_of(8) == Shuffle(1, (begin,), Shuffle(0))


def test_it_is_told_how_epochs_are_shuffled_when_that_changes() -> None:
    feed = feed_at(4)
    told: list[str] = []
    handle = feed.core.handle

    def listen(event: ev.Event, now: float) -> list[ev.Instruction]:
        done = handle(event, now)
        told.extend(note.text for note in kinds(done, ev.Note) if "shuffled" in note.text)
        return done

    feed.core.handle = listen  # type: ignore[method-assign]
    begin = join_now(feed, "b").cursor
    for block in range(4, 20):
        take(feed, "a", block)
        if block < begin + 12:
            take(feed, "b", block)
        elif "b" in feed.core.consumers.by_name:
            feed.send(ev.Leave("b"))
    for block in range(20, 30):
        take(feed, "a", block)
    assert told == [
        f"from epoch 1 on, samples are shuffled within segments cut at {begin}",
        "from epoch 3 on, samples are shuffled all together again",
    ]


def test_who_comes_when_an_epoch_has_hardly_begun_begins_with_it() -> None:
    assert join_now(feed_at(1), "b").cursor == 0
    assert join_now(feed_at(4), "b").cursor > 0


def test_who_comes_when_the_next_epoch_has_begun_begins_with_that() -> None:
    """Blocks of the next epoch are already prepared ahead, so its shuffle is fixed."""
    feed = feed_at(7)
    assert feed.core.epochs.has_begun(8)
    admitted = join_now(feed, "b")
    assert (admitted.cursor, admitted.own_epoch) == (8, OwnEpoch(8, 16, 0))


def test_who_has_ended_its_own_epoch_begins_the_next_one_there() -> None:
    feed, begin = side_by_side(9)
    assert feed.core.consumers.by_name["b"].own_epoch == OwnEpoch(begin + 8, begin + 16, begin)


def moved_on() -> tuple[Feed, int]:
    """Feed where "b" ended its own epoch, and the stream's next one began without its cut; and the next block."""
    feed, begin = side_by_side(8)
    feed.core.epochs.adopt(Resumption(17, OwnEpoch(16, 24), 2, Shuffle(2)), [])
    return feed, begin + 8


def test_who_cannot_begin_there_is_moved_on_to_the_next_epoch_of_the_stream() -> None:
    feed, end = moved_on()
    feed.ask("b", end)
    consumer = feed.core.consumers.by_name["b"]
    assert (consumer.cursor, consumer.own_epoch) == (16, OwnEpoch(16, 24))


def test_who_was_moved_on_and_asks_again_is_moved_on_again() -> None:
    """Its answer was lost, so it repeats the call from its old position."""
    feed, end = moved_on()
    feed.ask("b", end)
    feed.ask("b", end, began=end)
    consumer = feed.core.consumers.by_name["b"]
    assert (consumer.cursor, consumer.own_epoch) == (16, OwnEpoch(16, 24))


def test_no_call_brings_blocks_across_the_end_of_an_epoch_that_began_in_the_middle() -> None:
    """At that epoch's end it may have to continue elsewhere."""
    feed, begin = side_by_side(7, ahead=6)
    while feed.tasks:
        feed.finish(min(feed.tasks))
    assert feed.core.window.is_ready(begin + 8)
    assert delivered(feed.ask("b", begin + 7, want=4)) == {"b": (begin + 7,)}


def test_who_lacks_the_rest_of_an_epoch_that_is_another_here_gets_it_aside_and_then_leaves() -> None:
    """Then it joins again, as its loader does silently."""
    feed = feed_at(4)
    admitted = resume(feed, "b", Resumption(6, OwnEpoch(0, 8), 0, Shuffle(0, (16,), Shuffle(7))))
    by = admitted.cursor - 6
    assert by >= ASIDE * 8
    for block in (6, 7):
        assert take(feed, "b", block + by) == (block + by,)
    (refused,) = kinds(feed.ask("b", 8 + by), ev.Refuse)
    assert refused.consumer == "b"
    assert "b" not in feed.core.consumers.by_name
    assert feed.core.next_epoch == 1, "a side epoch does not count as one of the feed's"


def test_newcomers_do_not_follow_into_epochs_aside() -> None:
    feed = feed_at(4)
    resume(feed, "b", Resumption(6, OwnEpoch(0, 8), 0, Shuffle(0, (16,), Shuffle(7))))
    feed.send(ev.Leave("a"))
    assert join_now(feed, "c").cursor == 8
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join("d", feed.session)), ev.Admitted)
    assert admitted.cursor == 8


def test_nobody_moves_ahead_into_epochs_aside() -> None:
    feed = feed_at(4)
    resume(feed, "b", Resumption(6, OwnEpoch(0, 8), 0, Shuffle(0, (16,), Shuffle(7))))
    for block in range(4, 8):
        take(feed, "a", block)
    feed.ask("a", 8)
    assert feed.core.consumers.by_name["a"].own_epoch == OwnEpoch(8, 16)


def test_who_has_nothing_of_an_epoch_that_is_another_here_begins_the_next() -> None:
    feed = feed_at(4)
    resumed = Resumption(2, OwnEpoch(2, 10, 2), 0, Shuffle(0, (2,), Shuffle(7)), taken=False)
    admitted = resume(feed, "b", resumed)
    assert (admitted.cursor, admitted.own_epoch) == (8, OwnEpoch(8, 16))


def behind_one() -> Feed:
    """Feed where "a" and "b" reach the end of an epoch, and "c" is in the next one, too far ahead to share it."""
    feed = feed_at(3)
    feed.join("b", asks=False)
    for block in range(3):
        take(feed, "b", block)
    feed.join("c", 11, asks=False)
    for block in range(3, 8):
        take(feed, "a", block)
        take(feed, "b", block)
    for block in (11, 12):
        assert take(feed, "c", block) == (block,)
    assert len(feed.core.consumers.cohorts) == 2
    return feed


def test_those_behind_begin_their_next_epoch_with_who_is_ahead() -> None:
    """They are equally fast. If none moved, all of their blocks would be prepared twice from then on."""
    feed = behind_one()
    a, b, c = (feed.core.consumers.by_name[name] for name in "abc")
    notes = kinds(feed.ask("a", 8), ev.Note)
    assert [note.text for note in notes] == ["a joined the cohort of c"]
    assert a.cohort == c.cohort != b.cohort
    first = a.own_epoch.first
    assert first in (11, 12, 13)
    assert a.own_epoch == OwnEpoch(first, first + 8, first - 8)
    feed.ask("b", 8)
    assert b.cohort == c.cohort
    assert len(feed.core.consumers.cohorts) == 1


def test_who_has_just_joined_others_begins_with_them() -> None:
    """The feed assigned that start, and other consumers may wait for it."""
    feed = behind_one()
    feed.join("d", 8, flexible=True, asks=False)
    d, a = (feed.core.consumers.by_name[name] for name in "da")
    feed.ask("d", 8)
    assert (d.own_epoch.first, d.cohort) == (8, a.cohort)


def test_who_is_slower_does_not_follow_those_ahead() -> None:
    feed = behind_one()
    consumers = feed.core.consumers.by_name
    feed.core.consumers.prep_per_s = 100.0
    for name, per_s in (("a", 5.0), ("b", 5.0), ("c", 50.0)):
        consumers[name].blocks_per_s = per_s
    feed.ask("a", 8)
    assert (consumers["a"].own_epoch.first, consumers["a"].cohort) == (8, consumers["b"].cohort)
