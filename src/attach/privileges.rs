//! Gives up what root can do and a recording does not need.
//!
//! What is read from then on is the target's, and a mistake in reading it should be worth as little as can be. Only the
//! calling thread and those that it starts afterwards are concerned; a program that they execute as root gets all back.

use caps::{CapSet, Capability, CapsHashSet};

/// What is needed after the attach, and for what.
const NEEDED: [Capability; 6] = [
    // Memory and maps of a process of another user; the detach.
    Capability::CAP_SYS_PTRACE,
    // The target's seccomp filters, which are looked at again before the detach.
    Capability::CAP_SYS_ADMIN,
    // The short moments of high priority.
    Capability::CAP_SYS_NICE,
    // /proc of other users, and files in their folders where we were told to write.
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_DAC_OVERRIDE,
    // SIGINT for a program that we have started.
    Capability::CAP_KILL,
];

/// Drops all other capabilities of the calling thread. Where that is forbidden it keeps them: it is a second line of defence.
pub fn drop_unneeded() {
    let Ok(permitted) = caps::read(None, CapSet::Permitted) else {
        return;
    };
    let needed: CapsHashSet = NEEDED.into_iter().filter(|needed| permitted.contains(needed)).collect();
    // In this order: what is effective must be permitted.
    for set in [CapSet::Effective, CapSet::Permitted] {
        let now = caps::read(None, set).unwrap_or_default();
        let kept: CapsHashSet = now.intersection(&needed).copied().collect();
        let _ = caps::set(None, set, &kept);
    }
    let _ = caps::clear(None, CapSet::Inheritable);
}

/// Drops all capabilities of the calling thread, as far as that is possible: it needs none.
pub fn drop_all() {
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        let _ = caps::clear(None, set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_needed_goes() {
        // A thread of its own: it does not come back.
        let left = std::thread::spawn(|| {
            drop_unneeded();
            caps::read(None, CapSet::Permitted).unwrap()
        });
        let left = left.join().unwrap();
        assert!(left.iter().all(|capability| NEEDED.contains(capability)), "{left:?}");
        let before = caps::read(None, CapSet::Permitted).unwrap();
        assert!(
            NEEDED
                .iter()
                .all(|needed| before.contains(needed) == left.contains(needed))
        );
    }
}
