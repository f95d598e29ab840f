//! Calls of Longhorn's services that this build declares and does not serve.

/// Writes methods of a service that answer `UNIMPLEMENTED` with a sentence. The form is what `async_trait` makes of an
/// `async fn`: the attribute on the surrounding `impl` does not see into a macro.
macro_rules! unbuilt {
    ($($method:ident($request:ty) -> $answer:ty, $sentence:literal;)*) => {$(
        fn $method<'life0, 'async_trait>(
            &'life0 self,
            _: tonic::Request<$request>,
        ) -> std::pin::Pin<
            Box<dyn Future<Output = Result<tonic::Response<$answer>, tonic::Status>> + Send + 'async_trait>,
        >
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(std::future::ready(Err(tonic::Status::unimplemented($sentence))))
        }
    )*};
}

pub(crate) use unbuilt;
