//! The README shows the example as it is.

#[test]
fn the_readme_holds_the_embedding_example() {
    let readme = include_str!("../README.md");
    let example = include_str!("../examples/embed.rs");
    assert!(readme.contains(example.trim_end()), "README.md and examples/embed.rs have drifted apart");
}
