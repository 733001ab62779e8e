"""The bank of bank.c in Python: transfers between accounts, whose total never changes.

    python bank.py mojim.toml a [TRANSFERS]

A transfer is a block: its stores are committed together, or undone where it is refused.
"""

import random
import sys

import mojim

ACCOUNTS, OPENED_WITH = 64, 1000


class Refused(Exception):
    """The account has not so much."""


def main(config, node, transfers="10000"):
    with mojim.attach(config, node) as volume:
        bank = volume.array("bank", "i8", 1 + ACCOUNTS)
        made, account = bank[:1], bank[1:]
        if made[0] == 0:
            with volume.atomic():
                account[:] = OPENED_WITH
                made[0] = 1
        total = account.sum()
        if total != ACCOUNTS * OPENED_WITH:
            print("total", total, "wrong")
            return 1
        print("total", total, "ok", flush=True)
        for _ in range(int(transfers)):
            i, j, money = random.randrange(64), random.randrange(64), random.randrange(100)
            try:
                with volume.atomic(bank):  # 520 bytes: all of them, or none
                    made[0] += 1
                    account[j] += money
                    account[i] -= money
                    if money > 90 and account[i] < 0:
                        raise Refused
            except Refused:
                continue  # nothing has changed
            if made[0] % 1000 == 0:
                print("transfer", made[0], flush=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} CONFIG NODE [TRANSFERS]")
    sys.exit(main(*sys.argv[1:]))
