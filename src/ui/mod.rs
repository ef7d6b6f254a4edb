//! What the user types and sees.
pub mod cli;
