//! https, for pushing: who the server is, by the authorities that this system trusts and those of a file.

#[cfg(feature = "tls")]
pub use spoken::Tls;
#[cfg(not(feature = "tls"))]
pub use unspoken::Tls;

/// Bytes of a file of certificates.
#[cfg(feature = "tls")]
const MAX_FILE_BYTES: u64 = 16 << 20;

#[cfg(feature = "tls")]
mod spoken {
    use super::MAX_FILE_BYTES;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use std::io::Read as _;
    use std::path::Path;
    use std::sync::Arc;
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;

    /// Whom we trust.
    #[derive(Clone)]
    pub struct Tls(Arc<ClientConfig>);

    impl std::fmt::Debug for Tls {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Tls")
        }
    }

    impl Tls {
        /// Trusts the system's authorities, and those in `file` (PEM).
        ///
        /// # Errors
        /// With a sentence, when the file has none, or there are none at all.
        pub fn new(file: Option<&Path>) -> Result<Self, String> {
            let mut roots = RootCertStore::empty();
            // What of them cannot be read, or is none, is left out.
            let (system, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            let own = file.map_or(Ok(0), |file| add(&mut roots, file))?;
            if system + own == 0 {
                return Err(
                    "this system has no certificates of authorities (package ca-certificates): name a file with --ca-file"
                        .to_owned(),
                );
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?
                .with_root_certificates(roots)
                .with_no_client_auth();
            Ok(Self(Arc::new(config)))
        }

        /// Speaks TLS on `stream`, with a server that proves to be `host`.
        ///
        /// # Errors
        /// When it does not.
        pub async fn connect(&self, host: &str, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
            let name = ServerName::try_from(host.to_owned()).map_err(std::io::Error::other)?;
            TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await
        }
    }

    /// How many certificates of `file` are trusted now.
    fn add(roots: &mut RootCertStore, file: &Path) -> Result<usize, String> {
        let wrong = |why: String| format!("no certificates in {}: {why}", file.display());
        let mut text = Vec::new();
        std::fs::File::open(file)
            .and_then(|opened| opened.take(MAX_FILE_BYTES).read_to_end(&mut text))
            .map_err(|error| wrong(error.to_string()))?;
        let mut count = 0;
        for certificate in CertificateDer::pem_slice_iter(&text) {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            count += 1;
        }
        match count {
            0 => Err(wrong("it is no PEM file of any".to_owned())),
            count => Ok(count),
        }
    }
}

#[cfg(not(feature = "tls"))]
mod unspoken {
    use std::path::Path;
    use tokio::net::TcpStream;

    /// There is none.
    #[derive(Debug, Clone)]
    pub enum Tls {}

    impl Tls {
        /// Always fails.
        ///
        /// # Errors
        /// With a sentence.
        pub fn new(_file: Option<&Path>) -> Result<Self, String> {
            Err("this pyheap was built without https (feature `tls`): push to an agent on this host".to_owned())
        }

        /// Cannot be called.
        ///
        /// # Errors
        /// None.
        pub async fn connect(&self, _host: &str, _stream: TcpStream) -> std::io::Result<TcpStream> {
            match *self {}
        }
    }
}
