"""Keys that arrive together act one after the other."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TypeVar

from textual.app import App
from textual.events import Event, Key
from textual.message import Message
from textual.message_pump import MessagePump
from textual.timer import Timer

Result = TypeVar("Result")
_ROUNDS = 2
"""The first note follows the key itself, the second what its action has posted (a control's change, a dialogue)."""
_LOOK_S = 0.02
_LONGEST_S = 0.5
"""While a key waits for the one before: how often to look whether that one's note is still on its way, and for how
long. A note goes with the widget that has it, as when a key closes a dialogue."""


class KeyDone(Message):
    """Follows a key from the focused widget up to the app, behind whatever the key did on the way."""

    def __init__(self, key: Key, round_: int) -> None:
        super().__init__()
        self.key = key
        self.round = round_


class KeysInOrder(App[Result]):
    """An app that hands a key out only when the one before has done what it does.

    Textual 8 hands each key to the focused widget as it comes, while the action bound to it runs later, in the app's
    own queue. Of ``Down`` and ``9`` in one write, as over a slow line, the 9 would reach the row above, or the field
    that ``Tab`` leaves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._acting: Key | None = None
        self._acting_since_s = 0.0
        self._carrier: MessagePump = self
        self._waiting_keys: deque[Key] = deque()
        self._looking: Timer | None = None

    async def on_event(self, event: Event) -> None:
        """Hold back a key while another one acts."""
        if not isinstance(event, Key) or event.is_forwarded:
            await super().on_event(event)
        elif self._acting is None:
            await self._hand_out(event)
        else:
            self._waiting_keys.append(event)
            if self._looking is None:
                self._looking = self.set_interval(_LOOK_S, self._look)
            await self._look()

    async def on_key_done(self, message: KeyDone) -> None:
        """Once more behind what the key's action has posted; then the next key."""
        if message.key is not self._acting:
            return  # given up: it came late
        if message.round == _ROUNDS or not self._send(KeyDone(message.key, message.round + 1)):
            await self._next_key()

    async def _hand_out(self, key: Key) -> None:
        self._acting, self._acting_since_s = key, monotonic()
        self._carrier = self.focused or self.screen
        await super().on_event(key)
        if not self._carrier.post_message(KeyDone(key, 1)):
            await self._next_key()

    def _send(self, note: KeyDone) -> bool:
        """Send a note on its way from whoever gets the keys now."""
        self._carrier = self.focused or self.screen
        return self._carrier.post_message(note)

    async def _look(self) -> None:
        """Go on without a note that is lost."""
        if not self._carrier.is_attached or monotonic() - self._acting_since_s > _LONGEST_S:
            await self._next_key()

    async def _next_key(self) -> None:
        self._acting = None
        if self._waiting_keys:
            await self._hand_out(self._waiting_keys.popleft())
        if not self._waiting_keys and self._looking is not None:
            self._looking.stop()
            self._looking = None
