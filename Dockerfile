# The image of the programs, where a container runtime makes it; scripts/image makes the same without one. What is in it
# beside the programs is listed in deploy/image.files.
#   docker build -t longhorn:0.1.0 .
#   buildah build --isolation chroot -t longhorn:0.1.0 .      where nothing may make namespaces
# The base is Rust's own image, with the toolchain that rust-toolchain.toml names. Any other with Debian's packages and that
# toolchain serves, too: --build-arg BASE=registry.example/rust:1.95.0
ARG RUST=1.95.0
ARG BASE=docker.io/library/rust:${RUST}-bookworm

FROM ${BASE} AS build
ARG RUST
# Named here, the toolchain is taken as it is: rust-toolchain.toml wants components, too, which serve developers alone.
ENV RUSTUP_TOOLCHAIN=${RUST}
WORKDIR /longhorn
# Of all files only the list decides about packages.
COPY deploy/image.files deploy/image.files
RUN apt-get update && apt-get install -y --no-install-recommends binutils gcc libc6-dev python3 \
    $(awk '/^(program|file)/ { print $3 }' deploy/image.files | sort -u)
COPY . .
# What a build leaves behind is gigabytes, which whoever keeps layers would keep.
RUN cargo build --release --locked -p longhorn && scripts/image --directory /image && rm -rf target

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /
CMD ["longhorn", "--help"]
