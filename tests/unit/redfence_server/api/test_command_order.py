"""In which order the commands of one message begin."""

from __future__ import annotations

import random

from redfence_proto.v1 import lock_pb2
from redfence_server.api.command_order import in_order, rank


async def test_the_commands_of_a_large_message_are_sorted_in_bounded_parts() -> None:
    chance, turns = random.Random(1), list[int]()
    message = lock_pb2.SessionRequest()
    for number in range(1, 2_001):
        command = message.commands.add(id=number)
        getattr(command, chance.choice(["acquire", "release", "renew", "cancel"])).SetInParent()

    async def turn() -> None:
        turns.append(1)

    found = [message.commands[index] for index in await in_order(message.commands, turn)]
    assert found == sorted(message.commands, key=rank)
    assert len(turns) == 8
