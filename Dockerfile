# The image of the programs, where a container runtime makes it; scripts/image makes the same without one. What is in it
# beside the programs is listed in deploy/image.files.
#   docker build -t longhorn:0.1.0 .
FROM rust:1-bookworm AS build
WORKDIR /longhorn
COPY . .
RUN apt-get update && apt-get install -y --no-install-recommends python3 $(awk '/^(program|file)/ { print $3 }' deploy/image.files | sort -u)
RUN cargo build --release -p longhorn && scripts/image --directory /image

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["longhorn", "--help"]
