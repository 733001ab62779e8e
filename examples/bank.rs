//! A small bank: transfers between accounts, whose total never changes.
//!
//!     cargo run --release -p mojim --example bank -- mojim.toml a [TRANSFERS]
//!
//! The accounts lie in a heap, and a transfer is a transaction: whenever the program is killed, and
//! whichever node is lost, the total is right, and no transfer that was said to be done is missing.
//! It checks the total, makes that many transfers (default 10,000), and prints a line after each
//! thousandth of all that were ever made.

use mojim::{Error, Heap, Ptr, Volume, persistent};

const ACCOUNTS: usize = 64;
const OPENED_WITH: i64 = 1000;

persistent! {
    struct Bank {
        /// Ever made.
        transfers: u64,
        accounts: Ptr<[i64]>,
    }
}

/// Why a transfer was taken back.
enum Refused {
    Poor,
    Failed(Error),
}

impl From<Error> for Refused {
    fn from(e: Error) -> Refused {
        Refused::Failed(e)
    }
}

fn open(heap: &mut Heap) -> mojim::Result<Ptr<Bank>> {
    if let Some(bank) = heap.root("bank")? {
        return Ok(bank);
    }
    heap.atomically(|tx| {
        let accounts = tx.alloc_slice(&[OPENED_WITH; ACCOUNTS])?;
        let transfers = 0;
        let bank = tx.alloc(Bank {
            transfers,
            accounts,
        })?;
        tx.set_root("bank", bank)?;
        Ok(bank)
    })
}

fn transfer(
    heap: &mut Heap,
    bank: Ptr<Bank>,
    [from, to]: [usize; 2],
    money: i64,
) -> Result<u64, Refused> {
    heap.try_atomically(|tx| {
        let accounts = tx.get(bank)?.accounts;
        *tx.at_mut(accounts, from)? -= money;
        *tx.at_mut(accounts, to)? += money;
        if tx.get(accounts)?[from] < 0 {
            return Err(Refused::Poor); // all is as it was
        }
        let bank = tx.get_mut(bank)?;
        bank.transfers += 1;
        Ok(bank.transfers)
    })
}

fn run(config: &str, node: &str, todo: u64) -> mojim::Result<()> {
    let volume = Volume::attach(config, node, None)?;
    let mut heap = Heap::open(&volume, "bank.rust")?;
    let bank = open(&mut heap)?;
    let Bank {
        transfers,
        accounts,
    } = *heap.get(bank)?;
    let total: i64 = heap.get(accounts)?.iter().sum();
    if total != ACCOUNTS as i64 * OPENED_WITH {
        return Err(Error::Invalid(format!("total {total} wrong")));
    }
    println!("total {total} ok");
    let mut chance = transfers | 1;
    let mut below = |n: u64| {
        chance = chance
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (chance >> 33) % n
    };
    for _ in 0..todo {
        let which = [0; 2].map(|_| below(ACCOUNTS as u64) as usize);
        match transfer(&mut heap, bank, which, below(100) as i64) {
            Ok(n) if n % 1000 == 0 => println!("transfer {n}"),
            Ok(_) | Err(Refused::Poor) => {}
            Err(Refused::Failed(e)) => return Err(e),
        }
    }
    drop(heap);
    volume.detach()
}

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let todo = args.get(3).map_or(Ok(10_000), |n| n.parse());
    let (Some(config), Some(node), Ok(todo)) = (args.get(1), args.get(2), todo) else {
        eprintln!("usage: {} CONFIG NODE [TRANSFERS]", args[0]);
        return 2.into();
    };
    match run(config, node, todo) {
        Ok(()) => 0.into(),
        Err(e) => {
            eprintln!("{e}");
            1.into()
        }
    }
}
