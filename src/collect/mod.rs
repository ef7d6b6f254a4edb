//! From the ring in the target to events, traces and numbers here.
//!
//! Three threads joined by bounded queues. [`drain`] copies the ring's bytes out every few milliseconds and does nothing
//! else, so that the target never waits and a slow disk costs nothing but memory here; [`resolve`] turns records into
//! traces and events and keeps the model of what is live; the writer thread in [`recorder`] puts them into files.

pub mod drain;
pub mod files;
pub mod live;
pub mod memory;
pub mod names;
pub mod period;
pub mod recorder;
pub mod resolve;
pub mod rotation;
pub mod threads;
pub mod tree;
pub mod types;

use crossbeam_channel::{Receiver, RecvTimeoutError, Select};
use std::time::Duration;

pub use files::Files;
pub use live::Live;
pub use period::Limits;
pub use recorder::{Outcome, Recorder, Stop};
pub use rotation::Rotation;

/// Waits for a message, so long at most. `recv` would give up the processor several times before it waits, which took a fifth
/// of all that pyheap takes.
fn wait<T>(messages: &Receiver<T>, timeout: Option<Duration>) -> Result<T, RecvTimeoutError> {
    if let Ok(message) = messages.try_recv() {
        return Ok(message);
    }
    let mut select = Select::new();
    select.recv(messages);
    let ready = match timeout {
        Some(timeout) => select.select_timeout(timeout).map_err(|_| RecvTimeoutError::Timeout)?,
        None => select.select(),
    };
    ready.recv(messages).map_err(|_| RecvTimeoutError::Disconnected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_with_a_message_the_time_or_the_sender() {
        let (send, messages) = crossbeam_channel::bounded(2);
        assert_eq!(
            wait(&messages, Some(Duration::from_millis(1))),
            Err(RecvTimeoutError::Timeout)
        );
        send.send(1).unwrap();
        assert_eq!(wait(&messages, Some(Duration::ZERO)), Ok(1));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| (wait(&messages, None), wait(&messages, None)));
            send.send(2).unwrap();
            drop(send);
            assert_eq!(waiting.join().unwrap(), (Ok(2), Err(RecvTimeoutError::Disconnected)));
        });
    }
}
