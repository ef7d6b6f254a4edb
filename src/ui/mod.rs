//! What the user types and sees.
pub mod audit;
pub mod cli;
pub mod live;
pub mod output;
pub mod progress;
pub mod save;
pub mod units;
