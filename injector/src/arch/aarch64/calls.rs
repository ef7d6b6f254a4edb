//! System calls by number, and how each bears a stop.
//!
//! The numbers are those of `include/uapi/asm-generic/unistd.h`, which arm64 uses as it is; where this is compiled for
//! aarch64, they are compared with libc's.

#![expect(non_upper_case_globals, reason = "named as in libc")]

macro_rules! numbers {
    ($($name:ident = $number:literal),* $(,)?) => {
        $(pub(super) const $name: u64 = $number;)*
        #[cfg(target_arch = "aarch64")]
        const _: () = {
            $(assert!($number == libc::$name);)*
        };
    };
}

numbers! {
    SYS_epoll_pwait = 22, SYS_flock = 32, SYS_read = 63, SYS_write = 64, SYS_writev = 66, SYS_pwrite64 = 68, SYS_pwritev = 70,
    SYS_sendfile = 71, SYS_pselect6 = 72, SYS_ppoll = 73, SYS_vmsplice = 75, SYS_splice = 76, SYS_tee = 77,
    SYS_exit_group = 94, SYS_waitid = 95, SYS_futex = 98, SYS_nanosleep = 101, SYS_clock_nanosleep = 115, SYS_restart_syscall = 128,
    SYS_rt_sigprocmask = 135, SYS_rt_sigpending = 136, SYS_rt_sigtimedwait = 137, SYS_prctl = 167,
    SYS_semtimedop = 192, SYS_semop = 193, SYS_accept = 202, SYS_connect = 203, SYS_sendto = 206, SYS_recvfrom = 207,
    SYS_sendmsg = 211, SYS_recvmsg = 212, SYS_munmap = 215, SYS_clone = 220, SYS_mmap = 222, SYS_mprotect = 226, SYS_munlock = 229,
    SYS_accept4 = 242, SYS_wait4 = 260, SYS_sendmmsg = 269, SYS_copy_file_range = 285, SYS_pwritev2 = 287,
    SYS_close_range = 436, SYS_epoll_pwait2 = 441,
}

/// How well a thread that is blocked in system call `number` bears a stop: 0 best. `None` = it must not be stopped: the call
/// would return with a part of what it has done, which programs need not expect. The same calls as on x86-64, by this
/// processor's numbers; it has no select, poll, epoll_wait and pause but through these. `epoll_pwait` fails with EINTR at
/// any stop, and here nobody could make it again: see [`super::Registers`].
#[must_use]
pub fn restart_class(number: u64, args: [u64; 6]) -> Option<u8> {
    const MSG_WAITALL: u64 = 0x100;
    match number {
        SYS_read | SYS_wait4 | SYS_futex | SYS_waitid | SYS_pselect6 | SYS_ppoll => Some(0),
        SYS_nanosleep | SYS_clock_nanosleep | SYS_restart_syscall => Some(1),
        SYS_recvfrom if args[3] & MSG_WAITALL != 0 => None,
        SYS_recvmsg if args[2] & MSG_WAITALL != 0 => None,
        SYS_accept | SYS_accept4 | SYS_recvfrom | SYS_recvmsg | SYS_connect | SYS_flock => Some(2),
        SYS_write | SYS_pwrite64 | SYS_writev | SYS_pwritev | SYS_pwritev2 | SYS_sendto | SYS_sendmsg
        | SYS_sendmmsg | SYS_sendfile | SYS_splice | SYS_vmsplice | SYS_tee | SYS_copy_file_range => None,
        _ => Some(4),
    }
}

/// True for a call with a timeout, ended by any stop, that some C library makes again with its whole timeout:
/// `rt_sigtimedwait`, which musl makes so.
#[must_use]
pub const fn starts_timeout_anew(number: u64, args: [u64; 6]) -> bool {
    number == SYS_rt_sigtimedwait && args[2] != 0
}

/// Calls that a bare stop makes fail with EINTR although no signal came, and that can simply be made again: those
/// without a timeout, and those of which the timeout only starts with the next piece of data (sockets with `SO_RCVTIMEO`).
pub(super) const fn restarts_whole(number: u64, args: [u64; 6]) -> bool {
    match number {
        SYS_recvfrom | SYS_recvmsg | SYS_accept | SYS_accept4 | SYS_semop => true,
        // A timeout in milliseconds, negative = none.
        SYS_epoll_pwait => (args[3] as i32) < 0,
        // A pointer to the timeout.
        SYS_epoll_pwait2 | SYS_semtimedop => args[3] == 0,
        SYS_rt_sigtimedwait => args[2] == 0,
        _ => false,
    }
}

/// True for a call whose timeout is a length of time that the kernel keeps in the thread's restart block when the call is
/// interrupted: made again as it is, it would wait for the whole of it. (`nanosleep`, `kernel/time/hrtimer.c`;
/// `clock_nanosleep` without `TIMER_ABSTIME`; `FUTEX_WAIT` with a timeout, `kernel/futex/waitwake.c`; and one that goes on so
/// already. `FUTEX_WAIT_BITSET` goes on by a restart block too, but its timeout is a point in time.)
pub(super) const fn has_time_left(number: u64, args: [u64; 6]) -> bool {
    const TIMER_ABSTIME: u64 = 1;
    const FUTEX_COMMAND: u64 = 0x7f;
    const FUTEX_WAIT: u64 = 0;
    match number {
        SYS_nanosleep | SYS_restart_syscall => true,
        SYS_clock_nanosleep => args[1] & TIMER_ABSTIME == 0,
        SYS_futex => args[1] & FUTEX_COMMAND == FUTEX_WAIT && args[3] != 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_timeout_does_not_start_again() {
        assert!(has_time_left(SYS_nanosleep, [0; 6]));
        assert!(has_time_left(SYS_restart_syscall, [0; 6]));
        assert!(has_time_left(SYS_clock_nanosleep, [1, 0, 8, 8, 0, 0]));
        assert!(!has_time_left(SYS_clock_nanosleep, [1, 1, 8, 0, 0, 0]), "TIMER_ABSTIME");
        assert!(has_time_left(SYS_futex, [8, 0x80, 0, 8, 0, 0]), "FUTEX_WAIT");
        assert!(!has_time_left(SYS_futex, [8, 0x80, 0, 0, 0, 0]), "without a timeout");
        assert!(!has_time_left(SYS_futex, [8, 0x189, 0, 8, 0, 0]), "FUTEX_WAIT_BITSET");
        assert!(
            !has_time_left(SYS_ppoll, [0; 6]),
            "the kernel writes what is left to the caller's"
        );
    }

    #[test]
    fn what_would_come_back_short_is_not_stopped() {
        assert_eq!(restart_class(SYS_write, [0; 6]), None);
        assert_eq!(restart_class(SYS_recvfrom, [3, 8, 8, 0x100, 0, 0]), None);
        assert_eq!(restart_class(SYS_recvfrom, [3, 8, 8, 0, 0, 0]), Some(2));
        assert_eq!(restart_class(SYS_futex, [0; 6]), Some(0));
        assert_eq!(restart_class(SYS_epoll_pwait, [3, 8, 8, u64::MAX, 0, 0]), Some(4));
    }
}
